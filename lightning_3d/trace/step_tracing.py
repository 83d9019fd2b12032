"""Tracing the step methods of a module, with what else they do followed and put back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Protocol

import torch
from torch import nn

from lightning_3d.distributed.rng import host_position, seed_host
from lightning_3d.trace.interception import Router
from lightning_3d.trace.trace import Trace
from lightning_3d.trace.tracer import trace_step


class TracedEffects(Protocol):
    """Follows what a traced step does beside its loss."""

    @property
    def has_side_effects(self) -> bool:
        """As of a ``Trace``, of the step that was traced last; as ``not_microbatchable``."""

    @property
    def not_microbatchable(self) -> str | None: ...

    def undone(self) -> AbstractContextManager[None]:
        """Trace inside; what the step changes in its module is put back."""

    def returned(self, name: str, step: Callable[[], object]) -> object:
        """Run the step method ``name``; returns its output and what it logs or keeps, which count as outputs too."""


class StepTracing:
    """Traces the steps of a module."""

    def __init__(self, module: nn.Module, router: Router, effects: TracedEffects, device: torch.device) -> None:
        self._module, self._router, self._effects, self._device = module, router, effects, device

    def __call__(
        self,
        name: str,
        microbatch: object,
        rest: Sequence[object],
        *,
        with_data: bool = False,
        notes_storages: bool = False,
    ) -> Trace:
        """Trace ``module.<name>(microbatch, *rest)``; the others as for ``trace_step``."""

        def step() -> object:
            return self._effects.returned(name, lambda: getattr(self._module, name)(microbatch, *rest))

        with self._effects.undone():
            seed_host(0)
            calls_all = name == "training_step"
            module, router, device = self._module, self._router, self._device
            trace = trace_step(
                step,
                module,
                router,
                device,
                calls_all=calls_all,
                with_data=with_data,
                notes_storages=notes_storages,
            )
            once = (
                trace.not_microbatchable if calls_all else None
            )  # models that rescale weights for evaluation do it once
            return replace(
                trace,
                host_position=host_position(),
                has_side_effects=trace.has_side_effects or self._effects.has_side_effects,
                not_microbatchable=once or self._effects.not_microbatchable,
            )
