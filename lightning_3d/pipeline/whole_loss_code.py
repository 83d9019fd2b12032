"""The code of a step that no block depends on, run once on the whole batch: for losses that couple samples.

forwards of all microbatches      the blocks, on all stages
tail                              the user's step again, on the whole batch; blocks answer with what they gave
backward of the tail              down to what the blocks gave
backwards of all microbatches     from there on
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_3d.pipeline.microbatch_concat import Draws, received_concats
from lightning_3d.pipeline.traces import StepCall
from lightning_3d.planning.stage_flow import StageFlow


class WholeLossCode:
    """Hands tensors from the microbatches to the tail of a step, and their gradients back.

    Args:
        call: The step on the whole batch.
        flow: Its trace, cut with a tail.
        parts: Those of the microbatches.
        shares: The microbatches' shares of the samples.
        repeats_per_sample: Numbers of views in what the tail gets, by tensor; only the last stage knows them.
        trains: Whether the backward goes through the tail of the whole batch, not those of the microbatches.
    """

    def __init__(
        self,
        call: StepCall,
        flow: StageFlow,
        parts: Sequence[StageFlow],
        shares: Sequence[float],
        *,
        repeats_per_sample: Sequence[int] | None,
        trains: bool,
    ) -> None:
        self.call, self.flow, self.trains = call, flow, trains
        self.stage = flow.num_stages - 1
        """Its index, after those of the pipeline's stages."""
        self.draws = Draws(shares)
        self._concats = received_concats(self.stage, flow, parts, shares, repeats_per_sample)
        self._num_parts = len(parts)
        self._sent: dict[int, tuple[Tensor, ...]] = {}  # by microbatch
        self._requires_grad: list[bool] = []
        self._received: tuple[Tensor, ...] = ()
        self._gradients: list[Sequence[Tensor | None]] = []  # by tensor, by microbatch

    def take(self, index: int, sent: tuple[Tensor, ...]) -> bool:
        """Take what a microbatch sends to the tail; returns whether it was the last one."""
        self._sent[index] = tuple(tensor.detach() for tensor in sent)
        self._requires_grad = [tensor.requires_grad for tensor in sent]
        return len(self._sent) == self._num_parts

    def received(self) -> tuple[Tensor, ...]:
        """Leaves for the tail, joined over the microbatches."""
        sent = [self._sent.pop(index) for index in sorted(self._sent)]
        columns = zip(self._concats, zip(*sent, strict=True), self._requires_grad, strict=True)
        merged = [(concat.join(of_parts), requires_grad) for concat, of_parts, requires_grad in columns]
        self._received = tuple(tensor.requires_grad_(requires_grad and self.trains) for tensor, requires_grad in merged)
        return self._received

    def end_backward(self) -> None:
        """Take the gradients of what the tail received."""
        pairs = zip(self._concats, self._received, strict=True)
        self._gradients = [concat.split(tensor.grad) for concat, tensor in pairs]
        self._received = ()

    def gradients(self, index: int) -> list[Tensor | None]:
        """After the backward of the tail: the gradients of what a microbatch sent to it."""
        return [of_parts[index] for of_parts in self._gradients]


def loss_to_come(sent: Sequence[Tensor], gradients: Callable[[], Sequence[Tensor | None]]) -> Tensor:
    """A scalar whose backward, given one, gives these tensors the gradients that there are by then."""
    trained = [tensor for tensor in sent if tensor.requires_grad]

    def of_trained() -> list[Tensor | None]:
        pairs = zip(sent, gradients(), strict=True)
        return [gradient for tensor, gradient in pairs if tensor.requires_grad]

    if not trained:
        return torch.zeros((), device=sent[0].device if sent else None, requires_grad=True)
    loss: Tensor = _ToCome.apply(of_trained, *trained)  # type: ignore[no-untyped-call]  # torch 2.13
    return loss


class _ToCome(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gradients: Callable[[], Sequence[Tensor | None]], *tensors: Tensor) -> Tensor:
        ctx.gradients = gradients
        return tensors[0].new_zeros((), dtype=torch.float32)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return None, *ctx.gradients()
