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

from lightning_3d.errors import StepError
from lightning_3d.pipeline.microbatches import Microbatch
from lightning_3d.planning.stage_flow import StageFlow
from lightning_3d.trace.ghost import TensorMeta


class WholeTail:
    """Hands tensors from the microbatches to the tail of a step, and their gradients back.

    Args:
        parts: The microbatches.
        flows: Theirs, cut with a tail.
        batch: The whole batch.
        flow: Its, likewise.
    """

    def __init__(self, parts: Sequence[Microbatch], flows: Sequence[StageFlow], batch: Any, flow: StageFlow) -> None:
        self.microbatch, self.flow = Microbatch(batch=batch, weight=1.0), flow
        self.stage = flow.num_stages - 1
        """Its index, after those of the pipeline's stages."""
        names = [call.name for call in flow.trace.calls]
        if any([call.name for call in of_part.trace.calls] != names for of_part in flows):
            raise StepError(
                "The step makes other calls for the whole batch than for its microbatches, so the loss of the whole"
                " batch can't be computed from what the blocks gave. Set pipeline.loss='mean' or 'sum'."
            )
        metas = [f.metas(f.received(self.stage)) for f in flows]
        self._joints = [
            _Joint(whole, of_parts, [part.weight for part in parts])
            for whole, *of_parts in zip(flow.metas(flow.received(self.stage)), *metas, strict=True)
        ]
        self._num_parts = len(parts)
        self._sent: dict[int, tuple[Tensor, ...]] = {}  # by microbatch
        self._received: tuple[Tensor, ...] = ()
        self._gradients: list[Sequence[Tensor | None]] = []  # by tensor, by microbatch

    def take(self, index: int, sent: tuple[Tensor, ...]) -> bool:
        """Take what a microbatch sends to the tail; returns whether it was the last one."""
        self._sent[index] = sent
        return len(self._sent) == self._num_parts

    def received(self) -> tuple[Tensor, ...]:
        """What the tail receives: leaves, joined over the microbatches."""
        sent = [self._sent.pop(index) for index in sorted(self._sent)]
        joined = []
        for joint, of_parts in zip(self._joints, zip(*sent, strict=True), strict=True):
            requires_grad = of_parts[0].requires_grad
            joined.append(joint.join([tensor.detach() for tensor in of_parts]).requires_grad_(requires_grad))
        self._received = tuple(joined)
        return self._received

    def end_backward(self) -> None:
        """Take the gradients of what the tail received."""
        pairs = zip(self._joints, self._received, strict=True)
        self._gradients = [joint.split(tensor.grad) for joint, tensor in pairs]
        self._received = ()

    def gradients(self, index: int) -> list[Tensor | None]:
        """After the backward of the tail: the gradients of what a microbatch sent to it."""
        return [of_parts[index] for of_parts in self._gradients]


class _Joint:
    """How the tensors that the microbatches send make up that of the batch.

    Raises:
        StepError: they don't.
    """

    def __init__(self, whole: TensorMeta, parts: Sequence[TensorMeta], weights: Sequence[float]) -> None:
        self._weights = weights
        shapes = [part.shape for part in parts]
        if any(len(shape) != len(whole.shape) for shape in shapes):
            raise _unjoinable(whole, shapes)
        grown = [dim for dim, size in enumerate(whole.shape) if any(shape[dim] != size for shape in shapes)]
        self._dim = grown[0] if grown else None
        self._sizes = [shape[grown[0]] if grown else 0 for shape in shapes]
        if len(grown) > 1 or (grown and sum(self._sizes) != whole.shape[grown[0]]):
            raise _unjoinable(whole, shapes)

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        """Along the dimension of the samples; the mean of what has none, such as a loss of a block's own."""
        if self._dim is not None:
            return torch.cat(list(parts), self._dim)
        if not parts[0].is_floating_point():
            return parts[0].clone()
        return torch.stack([part * weight for part, weight in zip(parts, self._weights, strict=True)]).sum(0)

    def split(self, gradient: Tensor | None) -> Sequence[Tensor | None]:
        """The gradients of the parts, from that of the whole."""
        if gradient is None:
            return [None] * len(self._sizes)
        if self._dim is not None:
            return gradient.split(self._sizes, self._dim)
        return [gradient * weight for weight in self._weights]


def _unjoinable(whole: TensorMeta, shapes: Sequence[tuple[int, ...]]) -> StepError:
    return StepError(
        f"Blocks give tensors of shapes {shapes} for the microbatches, which don't make up the one of shape"
        f" {whole.shape} that they give for the whole batch, so its loss can't be computed. Let one dimension of what"
        " they return be the samples, or set pipeline.loss='mean' or 'sum'."
    )


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
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:  # type: ignore[override]  # torch declares Any
        return None, *ctx.gradients()
