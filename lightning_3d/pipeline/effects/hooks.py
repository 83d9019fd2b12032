"""Forward hooks that a step registers while it runs.

Models of transformers register the hooks that collect hidden states in their first forward, and remember it in an
attribute. Attributes that a step sets count after the step, for all its microbatches together (``attributes.py``); so
must its hooks. Every trace and every microbatch leaves the hooks as they were, and after the step those of the trace,
which ran on all ranks to the end, are registered for good.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn
from torch.utils.hooks import RemovableHandle
from typing_extensions import override

from lightning_3d.pipeline.effects.effect import Effect, StepContext
from lightning_3d.torch_internals.modules import forward_hook_registries


class LazyHooks(Effect):
    """The forward hooks of a model and of its blocks."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._traced: list[tuple[dict[int, object], int, object]] = []  # registry, key, hook

    @override
    @contextmanager
    def microbatch(self, context: StepContext) -> Iterator[None]:
        if context.is_trace:
            self._traced = []
        first = RemovableHandle.next_id  # keys are handed out ascending
        try:
            yield
        finally:
            registered = RemovableHandle.next_id != first
            for registry in self._registries() if registered else ():
                for key in [key for key in reversed(registry) if key >= first]:
                    hook = registry.pop(key)
                    if context.is_trace:
                        self._traced.append((registry, key, hook))

    @override
    def apply(self, merged: None, *, is_own: bool) -> None:
        for registry, key, hook in reversed(self._traced):
            registry[key] = hook
        self._traced = []

    @override
    def undo(self) -> None:
        self._traced = []

    def _registries(self) -> Iterator[dict[int, object]]:
        for module in self._module.modules():
            yield from forward_hook_registries(module)
