"""Calls that multiply an activation with a two-dimensional weight."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_3d.tensor.axis import Axis
from lightning_3d.tensor.placement import EACH, Parts, Shard, Sharded
from lightning_3d.tensor.rules.call import PARTIAL, Call, LocalCall
from lightning_3d.tensor.rules.function import Function
from lightning_3d.tensor.sharded_tensor import placement_of


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


def project(call: Call, axis: Axis) -> LocalCall | None:
    """A product with a sharded weight: column gives a sharded result, row a partial one."""
    projection = as_projection(call.function, call.args, call.kwargs)
    at = None if projection is None else placement_of(projection.weight)
    if projection is None or not isinstance(at, Sharded):
        return None
    if at.dim == projection.features_dim:
        return _column(projection, at)
    return None if isinstance(at, Parts) else _row(projection, at)


def _column(call: Projection, at: Shard | Parts) -> LocalCall:
    multiply = _multiply(call)
    result = at.at(call.input.dim() - 1)
    if call.bias is None:
        return LocalCall(
            tensors=(call.input, call.weight), needs=(EACH, at), run=multiply, result=result, weight=call.weight
        )
    is_alike = call.bias.shape[-1:] in ((), (1,))  # for all features
    return LocalCall(
        tensors=(call.input, call.weight, call.bias),
        needs=(EACH, at, EACH if is_alike else at.at(call.bias.dim() - 1)),
        run=multiply,
        result=result,
        weight=call.weight,
    )


def _row(call: Projection, at: Shard) -> LocalCall:
    bias = call.bias
    return LocalCall(
        tensors=(call.input, call.weight),
        needs=(Shard(call.input_dim), at),
        run=_multiply(call),
        result=PARTIAL,
        weight=call.weight,
        # Autocast may have chosen the dtype of the sum.
        then=None if bias is None else lambda output: output + bias.to(output.dtype),
    )


def _multiply(call: Projection) -> Callable[..., Tensor]:
    if call.features_dim == 0:
        return F.linear
    return lambda input, weight, bias=None: F.linear(input, weight.t(), bias)
