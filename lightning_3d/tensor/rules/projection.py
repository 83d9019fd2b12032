"""Calls that multiply an activation with a two-dimensional weight."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_3d.tensor.rules.function import Function


@dataclass(frozen=True, kw_only=True, slots=True)
class Projection:
    """One use of a weight: ``input @ weight + bias`` along the last dim of the input."""

    input: Tensor
    """``[..., contracted]``."""

    weight: Tensor
    """``[features, contracted]`` as in ``F.linear`` if `features_dim` is 0, else ``[contracted, features]``."""

    bias: Tensor | None
    """``[features]`` or broadcastable to the output."""

    features_dim: int

    @property
    def input_dim(self) -> int:
        """The contracted dim of the input, which is that of the features in the output."""
        return self.input.dim() - 1


def _linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Projection | None:
    return Projection(input=input, weight=weight, bias=bias, features_dim=0)


def _addmm(input: Tensor, mat1: Tensor, mat2: Tensor, **options: object) -> Projection | None:
    return None if options else Projection(input=mat1, weight=mat2, bias=input, features_dim=1)


def _mm(input: Tensor, mat2: Tensor, **options: object) -> Projection | None:
    return None if options else Projection(input=input, weight=mat2, bias=None, features_dim=1)


def _matmul(input: Tensor, other: Tensor, **options: object) -> Projection | None:
    return None if options else Projection(input=input, weight=other, bias=None, features_dim=1)


_PROJECTIONS: Mapping[Function, Callable[..., Projection | None]] = {
    F.linear: _linear,
    torch.addmm: _addmm,
    Tensor.addmm: _addmm,
    torch.mm: _mm,
    Tensor.mm: _mm,
    torch.matmul: _matmul,
    Tensor.matmul: _matmul,
    Tensor.__matmul__: _matmul,
}


def as_projection(function: Function, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Projection | None:
    """Read a call as ``input @ weight + bias`` with a two-dimensional weight, or None."""
    read = _PROJECTIONS.get(function)
    projection = read(*args, **kwargs) if read is not None else None
    if projection is None or not isinstance(projection.weight, Tensor) or projection.weight.dim() != 2:
        return None
    return projection
