"""Tracing a step method of the user's module, with all that it does beside its loss."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch import nn

from lightning_3d.trace.interception import Router
from lightning_3d.trace.trace import Trace
from lightning_3d.trace.tracer import trace_step


class TracedEffects(Protocol):
    """Follows what a traced step does beside its loss."""

    def undone(self) -> AbstractContextManager[None]:
        """Trace inside; what the step changes in its module is put back."""

    def returned(self, name: str, step: Callable[[], Any]) -> Any:
        """Run the step method ``name``; returns its output and what it logs or keeps, which count as outputs too."""


class StepTracing:
    """Traces the steps of a module.

    Args:
        module: The user's module.
        blocks: FQN -> block, routed by ``router``.
    """

    def __init__(
        self,
        module: nn.Module,
        blocks: Mapping[str, nn.Module],
        router: Router,
        effects: TracedEffects,
        device: torch.device,
    ) -> None:
        self._module, self._blocks, self._router = module, blocks, router
        self._effects, self._device = effects, device

    def __call__(self, name: str, microbatch: Any, rest: Sequence[Any]) -> Trace:
        """Trace ``module.<name>(microbatch, *rest)``."""

        def step() -> Any:
            return self._effects.returned(name, lambda: getattr(self._module, name)(microbatch, *rest))

        with self._effects.undone():
            calls_all = name == "training_step"
            return trace_step(step, self._module, self._blocks, self._router, self._device, calls_all=calls_all)
