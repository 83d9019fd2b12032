"""Calls that multiply an activation with a two-dimensional weight."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_3d.sharding.axis import Axis
from lightning_3d.sharding.placement import REPLICATE_PARTIAL_GRAD, InterleavedShard, Placement, Sharded
from lightning_3d.sharding.rules.call import PARTIAL, LocalCall, TorchCall
from lightning_3d.sharding.rules.function import Function
from lightning_3d.sharding.sharded_tensor import placement_of
from lightning_3d.torch_internals.autocast import as_autocast


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

    def run(self, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """The product of other operands, such as shards."""
        weight = as_autocast(weight)
        return F.linear(input, weight if self.features_dim == 0 else weight.t(), bias)

    def with_bias(self, output: Tensor) -> Tensor:
        """An output with the bias added; its dtype, which autocast may have chosen, stays."""
        assert self.bias is not None
        return output + self.bias.to(output.dtype)

    def column(self, at: Sharded, *, input: Placement, bias: Placement, result: Sharded) -> LocalCall:
        """Every rank computes its own features with its part of the weight."""
        operands, input_placements = (self.input, self.weight), (input, at)
        return LocalCall(
            tensors=operands if self.bias is None else (*operands, self.bias),
            input_placements=input_placements if self.bias is None else (*input_placements, bias),
            run=self.run,
            result=result,
            weight=self.weight,
        )

    def row(self, at: Sharded) -> LocalCall:
        """Every rank computes a part of the sum with its part of the weight; the bias is added to the sum."""
        return LocalCall(
            tensors=(self.input, self.weight),
            input_placements=(at.at(self.input_dim), at),
            run=self.run,
            result=PARTIAL,
            weight=self.weight,
            epilogue=None if self.bias is None else self.with_bias,
        )


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


def as_projection(call: TorchCall) -> Projection | None:
    """Read a call as ``input @ weight + bias`` with a two-dimensional weight, or None."""
    read = _PROJECTIONS.get(call.function)
    projection = read(*call.args, **call.kwargs) if read is not None else None
    if projection is None or not isinstance(projection.weight, Tensor) or projection.weight.dim() != 2:
        return None
    return projection


def project(call: TorchCall, axis: Axis) -> LocalCall | None:
    """A product with a sharded weight: column gives a sharded result, row a partial one."""
    projection = as_projection(call)
    at = None if projection is None else placement_of(projection.weight)
    if projection is None or at is None:
        return None
    if at.dim != projection.features_dim:
        return None if isinstance(at, InterleavedShard) else projection.row(at)
    bias = projection.bias
    is_alike = bias is None or bias.shape[-1:] in ((), (1,))  # for all features
    of_bias = REPLICATE_PARTIAL_GRAD if bias is None or is_alike else at.at(bias.dim() - 1)
    return projection.column(at, input=REPLICATE_PARTIAL_GRAD, bias=of_bias, result=at.at(projection.input_dim))
