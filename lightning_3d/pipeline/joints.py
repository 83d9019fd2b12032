"""How tensors of the microbatches make up that of the whole batch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_3d.errors import StepError
from lightning_3d.trace.ghost import TensorMeta


class Joint:
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

    @property
    def is_constant(self) -> bool:
        """Whether there are several parts, and their shapes do not depend on the samples."""
        return self._dim is None and len(self._weights) > 1

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        """Along the dimension of the samples; the mean of what has none, such as a loss of a block's own."""
        if self._dim is not None:
            return torch.cat(list(parts), self._dim)
        if not parts[0].is_floating_point():
            return parts[0].clone()
        return torch.stack([part * weight for part, weight in zip(parts, self._weights, strict=True)]).sum(0)

    def split(self, gradient: Tensor | None) -> list[Tensor | None]:
        """The gradients of the parts, from that of the whole."""
        if gradient is None:
            return [None] * len(self._sizes)
        if self._dim is not None:
            return list(gradient.split(self._sizes, self._dim))
        return [gradient * weight for weight in self._weights]


def _unjoinable(whole: TensorMeta, shapes: Sequence[tuple[int, ...]]) -> StepError:
    return StepError(
        f"Blocks give tensors of shapes {shapes} for the microbatches, which don't make up the one of shape"
        f" {whole.shape} that they give for the whole batch, so its loss can't be computed. Let one dimension of what"
        " they return be the samples, or set pipeline.loss='mean' or 'sum'."
    )
