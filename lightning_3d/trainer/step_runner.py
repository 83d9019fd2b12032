"""Running the user's step methods: on the whole model, or through the stages of a pipeline."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from lightning.pytorch import LightningModule
from torch import Tensor

from lightning_3d.distributed.rng import StepRandomness
from lightning_3d.errors import StepError
from lightning_3d.pipeline.engine import PipelineEngine
from lightning_3d.pipeline.loss import check_loss, loss_of
from lightning_3d.pipeline.spans import Timeline
from lightning_3d.tensor.vocabulary.sharded_output import plain
from lightning_3d.torch_internals.pytree import tree_map
from lightning_3d.trainer.pending_gradients import PendingGradients, zeroes_unseen
from lightning_3d.zero.engine import Zero
from lightning_3d.zero.gradients import Gradients


class StepRunner(Protocol):
    """Runs steps on this rank. ``number`` counts steps of any kind, for their random numbers."""

    @abstractmethod
    def train(self, batch: Any, rest: Sequence[Any], *, number: int, accumulating: bool) -> Any:
        """Run ``training_step(batch, *rest)``; returns what it returns, whose loss Lightning runs the backward of.

        Args:
            accumulating: Whether another backward follows before the optimizer's step.
        """

    @abstractmethod
    def evaluate(self, name: str, batch: Any, rest: Sequence[Any], *, number: int) -> Any:
        """Run ``<name>(batch, *rest)`` without gradients; returns what it returns."""

    @abstractmethod
    def before_backward(self, loss: Tensor) -> None:
        """Called before Lightning runs the backward of a loss."""

    @abstractmethod
    def after_backward(self) -> None:
        """Called when Lightning has run a backward."""

    @abstractmethod
    def after_optimizer_step(self) -> None:
        """Called when an optimizer has used the gradients."""

    @abstractmethod
    def start_timeline(self) -> None:
        """Measure the steps that follow."""

    @abstractmethod
    def finish_timeline(self) -> Timeline:
        """The steps measured since, of all ranks of the pipeline."""


class WholeModelRunner(StepRunner):
    """Runs steps at once, where every rank holds all blocks."""

    def __init__(self, module: LightningModule, zero: Zero, randomness: StepRandomness) -> None:
        self._module, self._zero, self._randomness = module, zero, randomness

    def train(self, batch: Any, rest: Sequence[Any], *, number: int, accumulating: bool) -> Any:
        self._zero.set_accumulating(accumulating)
        output = self._run("training_step", batch, rest, number=number)
        if self._module.automatic_optimization:
            check_loss(output)
        return output

    def evaluate(self, name: str, batch: Any, rest: Sequence[Any], *, number: int) -> Any:
        output = self._run(name, batch, rest, number=number)
        self._zero.settle()
        return output

    def _run(self, name: str, batch: Any, rest: Sequence[Any], *, number: int) -> Any:
        with self._randomness.replica(number):
            return tree_map(plain, self._zero.root(lambda: getattr(self._module, name)(batch, *rest)))

    def before_backward(self, loss: Tensor) -> None:
        self._zero.before_backward(loss)

    def after_backward(self) -> None:
        """Nothing: the gradients are where Lightning looks for them."""

    def after_optimizer_step(self) -> None:
        """Nothing."""

    def start_timeline(self) -> None:
        raise StepError("A timeline shows the schedule of a pipeline: set pipeline_parallel_size > 1.")

    def finish_timeline(self) -> Timeline:
        raise StepError("A timeline shows the schedule of a pipeline: set pipeline_parallel_size > 1.")


class PipelineRunner(StepRunner):
    """Runs steps in microbatches, forward and backward together.

    Args:
        splits_backward: Whether the schedule computes gradients of weights apart from those of inputs.
    """

    def __init__(
        self,
        module: LightningModule,
        zero: Zero,
        engine: PipelineEngine,
        gradients: Gradients,
        *,
        splits_backward: bool,
    ) -> None:
        self._module, self._zero, self._engine, self._gradients = module, zero, engine, gradients
        self._splits_backward = splits_backward
        self._pending = PendingGradients(zero)

    def train(self, batch: Any, rest: Sequence[Any], *, number: int, accumulating: bool) -> Any:
        self._pending.begin()
        self._zero.begin_step(splits_backward=self._splits_backward)
        output = self._engine.run("training_step", batch, rest, number=number, backward=True)
        self._zero.end_step()
        self._gradients.sum_shared()
        loss = self._pending.hold(loss_of(output))
        return {**output, "loss": loss} if isinstance(output, Mapping) else loss

    def evaluate(self, name: str, batch: Any, rest: Sequence[Any], *, number: int) -> Any:
        output = self._engine.run(name, batch, rest, number=number, backward=False)
        self._zero.settle()
        return output

    def before_backward(self, loss: Tensor) -> None:
        """Nothing: the backward has run."""

    def after_backward(self) -> None:
        self._pending.check_released()

    def after_optimizer_step(self) -> None:
        self._pending.used = zeroes_unseen(self._module.trainer, self._module)

    def start_timeline(self) -> None:
        self._engine.start_timeline()

    def finish_timeline(self) -> Timeline:
        return self._engine.finish_timeline()
