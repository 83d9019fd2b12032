"""Running the user's step methods: on the whole model, or through the stages of a pipeline."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Protocol

from lightning.pytorch import LightningModule
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor

from lightning_3d.distributed.rng import StepRandomness
from lightning_3d.errors import PlanError, SplitError, TraceError
from lightning_3d.pipeline.engine import PipelineEngine
from lightning_3d.pipeline.inline.step import InlineStep
from lightning_3d.pipeline.loss import check_loss, loss_of
from lightning_3d.planning.inline_mode import naming_inline
from lightning_3d.tensor.vocabulary.fused_heads import FusedHeads
from lightning_3d.tensor.vocabulary.lazy_tensor import made
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
    def around_backward(self, loss: Tensor, *, accumulating: bool) -> AbstractContextManager[None]:
        """Inside of it Lightning runs the backward of a loss; with manual optimization also between steps.

        Args:
            accumulating: As of ``train``.
        """

    @abstractmethod
    def after_optimizer_step(self) -> None:
        """Called when an optimizer has used the gradients."""

    engine: PipelineEngine | None = None
    """Runs the microbatches, where there are any."""


class WholeModelRunner(StepRunner):
    """Runs steps at once, where every rank holds all blocks, or calls of blocks are exchanged.

    Args:
        inline: Exchanges them.
    """

    def __init__(
        self,
        module: LightningModule,
        zero: Zero,
        randomness: StepRandomness,
        heads: FusedHeads,
        inline: InlineStep | None = None,
    ) -> None:
        self._heads, self._inline = heads, inline
        self._module, self._zero, self._randomness = module, zero, randomness
        self._steps_by_hand = False  # inside of a training step with manual optimization

    def train(self, batch: Any, rest: Sequence[Any], *, number: int, accumulating: bool) -> Any:
        self._zero.set_accumulating(accumulating)
        self._steps_by_hand = not self._module.automatic_optimization
        output = self._run("training_step", batch, rest, number=number)
        if not self._module.automatic_optimization:
            self._steps_by_hand = False
            self._zero.leave_step()
        elif self._module.trainer.world_size > 1:  # else no rank waits for another, and a step may skip its backward
            check_loss(output)
        return output

    def evaluate(self, name: str, batch: Any, rest: Sequence[Any], *, number: int) -> Any:
        output = self._run(name, batch, rest, number=number)
        self._zero.settle()
        return output

    def _run(self, name: str, batch: Any, rest: Sequence[Any], *, number: int) -> Any:
        def run() -> Any:
            with self._heads.on(), nullcontext() if self._inline is None else self._inline.on():
                output = getattr(self._module, name)(batch, *rest)
                return tree_map(made, output)

        with self._randomness.replica(number):
            return self._zero.root(run)

    @contextmanager
    def around_backward(self, loss: Tensor, *, accumulating: bool) -> Iterator[None]:
        self._zero.set_accumulating(accumulating)
        self._zero.before_backward(loss)
        yield
        self._zero.after_backward()
        if not self._steps_by_hand:
            self._zero.leave_step()

    def after_optimizer_step(self) -> None:
        if self._inline is not None:
            self._inline.weights.forget()


class PipelineRunner(StepRunner):
    """Runs steps in microbatches, forward and backward together.

    Args:
        randomness: Of steps.
        whole: The model is whole on every rank inside of the context that it gives.
        splits_backward: Whether the schedule computes gradients of weights apart from those of inputs.
        loss_scale: Gives the factor of the losses whose backward comes.
    """

    def __init__(
        self,
        module: LightningModule,
        zero: Zero,
        engine: PipelineEngine,
        gradients: Gradients,
        *,
        randomness: StepRandomness,
        whole: Callable[[], AbstractContextManager[None]],
        splits_backward: bool,
        loss_scale: Callable[[], float],
        heads: FusedHeads,
    ) -> None:
        self._heads = heads
        self._loss_scale = loss_scale
        self._module, self._zero, self._gradients = module, zero, gradients
        self.engine = self._engine = engine
        self._splits_backward = splits_backward
        self._pending = PendingGradients(zero)
        self._randomness, self._whole = randomness, whole
        self._unfollowed: set[str] = set()  # evaluations that stages can't run

    def train(self, batch: Any, rest: Sequence[Any], *, number: int, accumulating: bool) -> Any:
        loss_scale = self._loss_scale()
        self._pending.begin()
        self._zero.begin_step(splits_backward=self._splits_backward)
        try:
            with self._heads.on():
                output = self._engine.run(
                    "training_step", batch, rest, number=number, backward=True, loss_scale=loss_scale
                )
        except (PlanError, SplitError, TraceError) as error:
            naming_inline(error)
            raise
        self._zero.end_step()
        self._gradients.sum_shared()
        loss = self._pending.hold(loss_of(output))
        return {**output, "loss": loss} if isinstance(output, Mapping) else loss

    def evaluate(self, name: str, batch: Any, rest: Sequence[Any], *, number: int) -> Any:
        """In stages; where these can't follow the step, on every rank with the whole model."""
        if name not in self._unfollowed:
            try:
                with self._heads.on():
                    return self._engine.run(name, batch, rest, number=number, backward=False)
            except TraceError as error:
                if not error.lacks_data:
                    raise
                self._unfollowed.add(name)
                rank_zero_warn(
                    f"{name} can't run in pipeline stages. For each of its batches every rank now gathers the whole"
                    f" model, and runs the whole step. {error}"
                )
            finally:
                self._zero.settle()
        with self._whole(), self._randomness.replica(number):
            return getattr(self._module, name)(batch, *rest)

    @contextmanager
    def around_backward(self, loss: Tensor, *, accumulating: bool) -> Iterator[None]:
        yield  # the backward has run; Lightning's puts the gradients in place
        self._pending.check_released()

    def after_optimizer_step(self) -> None:
        self._pending.used = zeroes_unseen(self._module.trainer, self._module)
