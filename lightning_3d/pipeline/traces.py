"""Traces of a module's steps, kept by kind of batch."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from typing import Any, TypeVar

import torch
from torch import nn

from lightning_3d.pipeline.microbatches import signature
from lightning_3d.trace.trace import Trace
from lightning_3d.trace.tracer import StepTracing

T = TypeVar("T")

_MAX_CACHED = 64


class Traces:
    """Traces steps, each kind once."""

    def __init__(self, module: nn.Module, tracing: StepTracing) -> None:
        self._module, self._tracing = module, tracing
        self._known: OrderedDict[Hashable, Trace] = OrderedDict()

    def key(self, name: str, batch: Any) -> Hashable:
        """All that the trace of ``module.<name>(batch, ...)`` depends on."""
        # What is frozen may change while training.
        trainable = bytes(parameter.requires_grad for parameter in self._module.parameters())
        return name, self._module.training, torch.is_grad_enabled(), trainable, signature(batch)

    def __call__(self, name: str, batch: Any, rest: Sequence[Any]) -> Trace:
        """Trace ``module.<name>(batch, *rest)``."""
        return cached(self._known, self.key(name, batch), lambda: self._tracing(name, batch, rest))


def cached(cache: OrderedDict[Hashable, T], key: Hashable, make: Callable[[], T]) -> T:
    """The value for this key, made if it is not among those used last."""
    if key not in cache:
        cache[key] = make()
        if len(cache) > _MAX_CACHED:
            cache.popitem(last=False)
    cache.move_to_end(key)
    return cache[key]
