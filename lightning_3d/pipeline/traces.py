"""Calls of a module's steps, and their traces, kept by kind of call."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import nn

from lightning_3d.pipeline.microbatches import batch_size, signature
from lightning_3d.trace.trace import Trace
from lightning_3d.trace.tracer import StepTracing
from lightning_3d.trace.world_collectives import world_collectives_refused

T = TypeVar("T")

_MAX_CACHED = 64


@dataclass(frozen=True, kw_only=True)
class StepCall:
    """A call of a step of the user's module, on a batch or a part of it."""

    name: str
    """``"training_step"``, ``"validation_step"``, ..."""
    batch: Any
    rest: Sequence[Any]
    """Its further arguments."""
    kind: Hashable
    """All that its trace depends on."""

    @property
    def size(self) -> int:
        """Samples in the batch."""
        return batch_size(self.batch)

    def run(self, module: nn.Module) -> Any:
        """Call it."""
        return getattr(module, self.name)(self.batch, *self.rest)


class Traces:
    """Traces steps, each kind once."""

    def __init__(self, module: nn.Module, tracing: StepTracing) -> None:
        self._module, self._tracing = module, tracing
        self._known: OrderedDict[Hashable, Trace] = OrderedDict()

    def calls(self, name: str, batches: Sequence[Any], rest: Sequence[Any]) -> list[StepCall]:
        """The calls ``module.<name>(batch, *rest)``, as the module is now."""
        # What is frozen may change while training.
        trainable = bytes(parameter.requires_grad for parameter in self._module.parameters())
        state = name, self._module.training, torch.is_grad_enabled(), trainable
        return [StepCall(name=name, batch=batch, rest=rest, kind=(*state, signature(batch))) for batch in batches]

    def trace(self, call: StepCall) -> Trace:
        """The trace of such a call."""
        return cached(self._known, call.kind, lambda: self._traced(call))

    def _traced(self, call: StepCall) -> Trace:
        with world_collectives_refused():
            return self._tracing(call.name, call.batch, call.rest)


def cached(cache: OrderedDict[Hashable, T], key: Hashable, make: Callable[[], T]) -> T:
    """The value for this key, made if it is not among those used last."""
    if key not in cache:
        cache[key] = make()
        if len(cache) > _MAX_CACHED:
            cache.popitem(last=False)
    cache.move_to_end(key)
    return cache[key]
