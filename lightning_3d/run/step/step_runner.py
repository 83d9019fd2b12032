"""Running the user's step methods: on the whole model, or through the stages of a pipeline."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, Protocol

import torch
from lightning.pytorch import LightningModule
from lightning_utilities.core.rank_zero import rank_zero_info
from torch import Tensor

from lightning_3d.context.steps import ContextSteps
from lightning_3d.distributed.rng import StepRandomness
from lightning_3d.pipeline.attempt import StepFailed
from lightning_3d.pipeline.engine import PipelineEngine
from lightning_3d.pipeline.inline.step import InlineStep
from lightning_3d.pipeline.loss import check_loss, loss_of
from lightning_3d.planning.inline_mode import inline_text, naming_inline, once_inline_text, unfollowed_text
from lightning_3d.precision.plugin import ThreeDPrecision
from lightning_3d.run.step.pending_gradients import PendingGradients, zeroes_unseen
from lightning_3d.tensor.vocabulary.fused_heads import FusedHeads
from lightning_3d.tensor.vocabulary.lazy_tensor import made
from lightning_3d.torch_internals.pytree import tree_map
from lightning_3d.zero.engine import Zero
from lightning_3d.zero.gradients import Gradients

TRAINING = "training_step"


class StepRunner(Protocol):
    """Runs steps on this rank. ``number`` counts steps of any kind, for their random numbers."""

    @abstractmethod
    def train(self, batch: object, rest: Sequence[object], *, number: int, accumulating: bool) -> Any:
        """Run ``training_step(batch, *rest)``; returns what it returns, whose loss Lightning runs the backward of.

        Args:
            accumulating: Whether another backward follows before the optimizer's step.
        """

    @abstractmethod
    def evaluate(self, name: str, batch: object, rest: Sequence[object], *, number: int) -> Any:
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
    """Runs the microbatches of training, where there are any."""

    inline: Mapping[str, str] = {}
    """Names of steps that have come to run inline -> why."""

    context: ContextSteps | None = None
    """Runs them on slices of sequences, where ranks share these."""


class WholeModelRunner(StepRunner):
    """Runs steps at once, where every rank holds all blocks, or calls of blocks are exchanged.

    Args:
        inline: Exchanges them.
        context: Cuts sequences, where ranks share them.
    """

    def __init__(
        self,
        module: LightningModule,
        zero: Zero,
        randomness: StepRandomness,
        heads: FusedHeads,
        inline: InlineStep | None = None,
        context: ContextSteps | None = None,
    ) -> None:
        self._heads, self._inline, self.context = heads, inline, context
        self._module, self._zero, self._randomness = module, zero, randomness
        self._steps_by_hand = False  # inside of a training step with manual optimization

    def train(self, batch: object, rest: Sequence[object], *, number: int, accumulating: bool) -> Any:
        self._zero.set_accumulating(accumulating)
        self._steps_by_hand = not self._module.automatic_optimization
        output = self._run(TRAINING, batch, rest, number=number)
        if not self._module.automatic_optimization:
            self._steps_by_hand = False
            self._zero.stop_sync()
        elif self._module.trainer.world_size > 1:  # else no rank waits for another, and a step may skip its backward
            check_loss(output)
        return output

    def evaluate(self, name: str, batch: object, rest: Sequence[object], *, number: int) -> Any:
        output = self._run(name, batch, rest, number=number)
        self._zero.wait_params()
        return output

    def _run(self, name: str, batch: object, rest: Sequence[object], *, number: int) -> Any:
        def run() -> Any:
            with self._heads.on(), nullcontext() if self._inline is None else self._inline.on():
                step = partial(getattr(self._module, name), batch, *rest)
                return tree_map(made, step() if self.context is None else self._on_slices(self.context, name, step))

        with self._randomness.replica(number):
            return self._zero.root(run)

    def _on_slices(self, context: ContextSteps, name: str, step: Callable[[], Any]) -> Any:
        output = context.run(step, gathers=name != "predict_step" or context.config.gather_outputs)
        if not context.has_sequence:
            raise context.no_sequence()
        return output

    @contextmanager
    def around_backward(self, loss: Tensor, *, accumulating: bool) -> Iterator[None]:
        self._zero.set_accumulating(accumulating)
        self._zero.before_backward(loss)
        with nullcontext() if self._inline is None else self._inline.backward():
            yield
        self._zero.after_backward()
        if not self._steps_by_hand:
            self._zero.stop_sync()

    def after_optimizer_step(self) -> None:
        if self._inline is not None:
            self._inline.weights.forget()


class PipelineRunner(StepRunner):
    """Runs steps in microbatches, forward and backward together; inline where these can't.

    A training step that fails in microbatches runs inline, and all that follow do if it was the first, or fails again.
    Evaluations of its kind do at once.

    Args:
        mode: ``pipeline.mode``: whether training steps may run inline.
        fallback: Runs steps inline.
        splits_backward: Whether the schedule computes gradients of weights apart from those of inputs.
        precision: Scales losses.
    """

    def __init__(
        self,
        module: LightningModule,
        zero: Zero,
        engine: PipelineEngine,
        gradients: Gradients,
        *,
        mode: str,
        fallback: WholeModelRunner,
        splits_backward: bool,
        precision: ThreeDPrecision,
        heads: FusedHeads,
    ) -> None:
        self._heads, self._mode = heads, mode
        self._precision, self._fallback = precision, fallback
        self._module, self._zero, self._gradients = module, zero, gradients
        self.engine = self._engine = engine
        self.context = engine.context
        self._splits_backward = splits_backward
        self._pending = PendingGradients(zero)
        self._has_trained = self._has_failed = False  # whether training steps have, in microbatches
        self._is_inline = False  # the present step

    def train(self, batch: object, rest: Sequence[object], *, number: int, accumulating: bool) -> Any:
        self._is_inline = TRAINING in self.inline
        while not self._is_inline:
            try:
                return self._train_in_microbatches(batch, rest, number=number)
            except StepFailed as error:
                failed = error
            self._zero.abandon_step()
            self._pending.abandon()
            if self._engine.studies_again(failed):
                continue
            self._leave(TRAINING, failed, is_final=self._has_failed or not self._has_trained)
            self._is_inline = self._has_failed = True
        self._precision.scales_itself = True
        return self._fallback.train(batch, rest, number=number, accumulating=accumulating)

    def _train_in_microbatches(self, batch: object, rest: Sequence[object], *, number: int) -> Any:
        self._precision.scales_itself = False
        self._pending.begin()
        self._zero.begin_step(splits_backward=self._splits_backward)
        with self._heads.on():
            output = self._engine.run(
                TRAINING, batch, rest, number=number, backward=True, loss_scale=self._precision.loss_scale
            )
        self._zero.end_step()
        self._gradients.sum_shared()
        self._has_trained = True
        loss = self._pending.hold(loss_of(output))
        return {**output, "loss": loss} if isinstance(output, Mapping) else loss

    def evaluate(self, name: str, batch: object, rest: Sequence[object], *, number: int) -> Any:
        if name not in self.inline:
            try:
                with self._heads.on():
                    return self._engine.run(name, batch, rest, number=number, backward=False)
            except StepFailed as error:
                failed = error
            finally:
                self._zero.wait_params()
            self._leave(name, failed, is_final=True)
        return self._fallback.evaluate(name, batch, rest, number=number)

    def _leave(self, name: str, failed: StepFailed, *, is_final: bool) -> None:
        """Say that a step runs inline, or raise why it does not.

        Args:
            is_final: Whether all that follow do, too.
        """
        error = failed.error
        if not failed.is_undone:
            error.add_note("It does not run inline, as a block has changed a buffer that the step before left alone.")
        is_refused = not failed.is_undone or isinstance(error, torch.OutOfMemoryError)
        if is_refused or (name == TRAINING and self._mode == "microbatched"):
            raise naming_inline(error, self._mode) if name == TRAINING else error
        why = unfollowed_text(error)
        if is_final:
            self.inline = {**self.inline, name: why}
            self.engine = None if name == TRAINING else self.engine
        text = inline_text(why) if is_final else once_inline_text(why)
        rank_zero_info(f"{type(self._module).__name__}.{name}: {text}")

    @contextmanager
    def around_backward(self, loss: Tensor, *, accumulating: bool) -> Iterator[None]:
        if self._is_inline:
            with self._fallback.around_backward(loss, accumulating=accumulating):
                yield
            return
        yield  # the backward has run; Lightning's puts the gradients in place
        self._pending.check_released()

    def after_optimizer_step(self) -> None:
        self._pending.used = zeroes_unseen(self._module.trainer, self._module)
        self._fallback.after_optimizer_step()
