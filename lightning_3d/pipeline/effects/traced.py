"""What a step does beside its loss while it is traced: noted as outputs of the step, and undone."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from lightning.pytorch import LightningModule
from torch import nn

from lightning_3d.model.snapshot import preserved
from lightning_3d.pipeline.effects.attributes import StepAttributes
from lightning_3d.pipeline.effects.hooks import LazyHooks
from lightning_3d.pipeline.effects.metrics import metrics_of
from lightning_3d.pipeline.effects.recorder import StepRecorder
from lightning_3d.pipeline.loss import check_loss
from lightning_3d.torch_internals.random_states import random_states_kept
from lightning_3d.trace.interception import Router


class TracedStepEffects:
    """The ``TracedEffects`` of a module.

    Args:
        module: The user's module.
        blocks: FQN -> block, routed by ``router``.
    """

    def __init__(self, module: LightningModule, blocks: Mapping[str, nn.Module], router: Router) -> None:
        self._module, self._blocks, self._router = module, blocks, router
        self._attributes = StepAttributes(module, blocks.values())
        self.saw_calls_in_blocks = False
        """Whether a block logged or updated a metric in a trace so far."""
        self.hooks = LazyHooks(module)

    @contextmanager
    def undone(self) -> Iterator[None]:
        """Put back attributes, forward hooks and random states."""
        state_kept = preserved(self._module, without_data=self._blocks.values())
        hooks = self.hooks.put_back(is_trace=True)
        with random_states_kept(), state_kept, hooks, self._attributes.step(), self._attributes.microbatch():
            yield

    def returned(self, name: str, step: Callable[[], Any]) -> Any:
        """Run the step method ``name``; returns its output, what it logged, and the tensors in its attributes."""
        recorder = StepRecorder(self._module, metrics_of(self._module), self._router)
        try:
            with recorder.installed(), recorder.microbatch(0, 0, keeps_glue=True):
                output = step()
        finally:
            self.saw_calls_in_blocks |= recorder.was_called_in_blocks
        if name == "training_step":
            check_loss(output)
        return output, recorder.noted(0, 0), self._attributes.tensors()
