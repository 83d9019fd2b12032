"""Steps that run inline on ranks which were made for microbatches: of a step that failed so, and of those after it.

To ZeRO it is a pipeline step of one microbatch, whose backward Lightning runs. Its gradients are reduced in each step,
also where several accumulate, as those of the steps in microbatches among them are.

    code around the blocks     runs on all ranks, on the whole batch: gradients of its parameters are complete on each
    blocks                     run on one rank each: gradients of weights that several ranks hold are summed
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from typing_extensions import override

from lightning_3d.distributed.rng import StepRandomness
from lightning_3d.pipeline.inline.step import InlineStep
from lightning_3d.pipeline.loss import check_loss
from lightning_3d.precision.plugin import ThreeDPrecision
from lightning_3d.run.step.step_runner import TRAINING, WholeModelRunner
from lightning_3d.tensor.vocabulary.fused_heads import FusedHeads
from lightning_3d.zero.engine import HeldGradients, Zero
from lightning_3d.zero.gradients import Gradients


class InlineFallback(WholeModelRunner):
    """Runs them.

    Args:
        of_blocks: The parameters of blocks.
    """

    def __init__(
        self,
        module: LightningModule,
        zero: Zero,
        gradients: Gradients,
        randomness: StepRandomness,
        inline: InlineStep,
        of_blocks: Collection[nn.Parameter],
        precision: ThreeDPrecision,
    ) -> None:
        super().__init__(module, zero, randomness, FusedHeads({}, None), inline)
        self._gradients, self._of_blocks, self._precision = gradients, of_blocks, precision

    @override
    def train(self, batch: object, rest: Sequence[object], *, number: int, accumulating: bool) -> Any:
        self._zero.begin_step(splits_backward=False)
        output = self._run(TRAINING, batch, rest, number=number)
        check_loss(output)
        return output

    @override
    @contextmanager
    def around_backward(self, loss: Tensor, *, accumulating: bool) -> Iterator[None]:
        older: list[HeldGradients] = []  # reduced, and carrying the loss scale of this step by now
        hook = loss.register_hook(lambda _: older.append(self._zero.take_gradients()))

        def end() -> None:
            self._zero.end_step()
            self._gradients.sum_shared(among=self._of_blocks)
            for held in older:
                self._zero.add_gradients(held, scale=torch.ones((), device=loss.device))
            self._zero.gather_grads()

        with self._precision.before_hooks(end):
            yield
        hook.remove()
