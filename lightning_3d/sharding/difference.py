"""How far the tensors of a sharded block are from those of the dense one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from lightning_3d.model.reals import as_reals

_CHUNK = 2**18
"""Elements that are compared at a time, so that copies in float64 stay small."""

Values = Sequence[Tensor | None]


def difference(expected: Values, actual: Values, tolerance: float) -> float:
    """The greatest relative difference of the tensors of one kind.

    A tensor is compared relative to its own greatest element, but at least to `tolerance` times the greatest of its
    kind: a gradient that is zero but for rounding (the bias of a key projection) does not count as wrong.
    """
    if len(expected) != len(actual):
        return float("inf")
    largest = max((_largest(tensor) for tensor in expected), default=0.0)
    return max(_relative(expected, actual, tolerance * largest), default=0.0)


def _relative(expected: Values, actual: Values, floor: float) -> Iterator[float]:
    for left, right in zip(expected, actual, strict=True):
        if left is None or right is None or left.shape != right.shape:
            yield 0.0 if left is right else float("inf")
        else:
            yield _distance(left, right) / max(_largest(left), floor, torch.finfo(torch.float64).tiny)


def _distance(left: Tensor, right: Tensor) -> float:
    """The greatest difference of finite values; infinite if others are not at the same places."""
    distance = 0.0
    for a, b in zip(_chunks(left), _chunks(right), strict=True):
        if not torch.equal(a.isfinite(), b.isfinite()):
            return float("inf")
        distance = max(distance, _largest_finite(a - b))
    return distance


def _largest(tensor: Tensor | None) -> float:
    """The greatest finite absolute value; what is not finite is compared by place."""
    return 0.0 if tensor is None else max(map(_largest_finite, _chunks(tensor)), default=0.0)


def _chunks(tensor: Tensor) -> Iterator[Tensor]:
    if tensor.numel():
        yield from (chunk.double() for chunk in as_reals(tensor.detach()).flatten().split(_CHUNK))


def _largest_finite(chunk: Tensor) -> float:
    return float(torch.where(chunk.isfinite(), chunk, 0.0).abs().max())
