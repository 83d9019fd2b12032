"""Uses of sharded weights on shards: projections and contractions with column and row weights.

Every rank computes with its own shard of the weight; a column weight gives a sharded result, a row weight a partial one
that is reduced at once. Weights in grouped order (`parts`) give results in grouped order.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Generic, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from lightning_3d.tensor.parts import Parts
from lightning_3d.tensor.rules.aliases import alias_dims, only_first_is_sharded
from lightning_3d.tensor.rules.contraction import Contraction, as_contraction
from lightning_3d.tensor.rules.convolution import Convolution, as_convolution
from lightning_3d.tensor.rules.function import Function, map_tensors
from lightning_3d.tensor.rules.grouped import GroupedTensor
from lightning_3d.tensor.rules.projection import Projection, as_projection
from lightning_3d.tensor.rules.sequence import SEQUENCE_DIM, is_along
from lightning_3d.tensor.run import crossing
from lightning_3d.tensor.run.crossing import local_shard, shard_dim
from lightning_3d.tensor.run.gathered import GatheredSequence
from lightning_3d.tensor.run.grouped_calls import cut_parts, whole
from lightning_3d.tensor.run.partial_sums import PartialSum
from lightning_3d.tensor.run.sharded_activation import ShardedActivation
from lightning_3d.torch_internals.tensors import version_of

T = TypeVar("T")


class WeightCalls:
    """For one forward of one block.

    Args:
        mesh: The tp axis.
        sequence: Full shape (B, T, D) of the block's input that is cut along its sequence; None if none is.
        defers_sums: Whether what row weights of experts give is reduced later (`partial_sums`).
    """

    def __init__(self, mesh: DeviceMesh, sequence: torch.Size | None, *, defers_sums: bool) -> None:
        self._mesh, self._sequence, self._defers_sums = mesh, sequence, defers_sums
        # By what column weights read: plain activations, and slices of the sequence.
        self._entered: _ByTensor[Tensor] = _ByTensor()
        self._own: _ByTensor[Tensor] = _ByTensor()
        """The own shards of weights that aliases were made of."""
        self._gathered: _ByTensor[GatheredSequence] = _ByTensor()

    def answer(self, function: Function, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """The result of a call if it is a use of a sharded weight, or makes aliases of one; else None."""
        projection = as_projection(function, args, kwargs)
        if projection is not None and isinstance(weight := projection.weight, GroupedTensor):
            if weight.parts.dim == projection.features_dim:
                return self._project_on_parts(projection, weight)
        elif projection is not None and shard_dim(projection.weight, self._mesh) is not None:
            return self._project(projection)
        if (made := self._aliases(function, args, kwargs)) is not None:
            return made
        contraction = as_contraction(function, args, kwargs, self._is_weight)
        if contraction is not None:
            dim, has_parts = self._dim(contraction.weight), isinstance(contraction.weight, GroupedTensor)
            if contraction.separates(dim, has_parts=has_parts):
                return self._contract(contraction)
        convolution = as_convolution(function, args, kwargs)
        return None if convolution is None else self._convolve(convolution)

    def _project(self, call: Projection) -> Tensor:
        """``input @ weight + bias`` with a sharded weight: column gives a sharded result, row a plain one."""
        weight, bias = call.weight, call.bias
        matrix = local_shard(weight) if call.features_dim == 0 else local_shard(weight).t()
        if shard_dim(weight, self._mesh) == call.features_dim:
            part = None if bias is None else self._column_bias(bias)
            output = self._column(call.input, matrix, part)
            return crossing.as_sharded(output, self._mesh, output.dim() - 1)
        partial = F.linear(self._row_input(call.input), matrix)
        if is_along(partial, self._sequence):
            sliced = crossing.scatter_rows(partial, self._mesh, SEQUENCE_DIM)
            if bias is None:
                return sliced
            added = self.column_input(whole(bias)).to(sliced.dtype)  # which autocast may have chosen
            return crossing.as_sharded(sliced.local + added, self._mesh, SEQUENCE_DIM)
        output = crossing.reduce_rows(partial, self._mesh)
        return output if bias is None else output + whole(bias).to(output.dtype)

    def _is_weight(self, tensor: Tensor) -> bool:
        if isinstance(tensor, DTensor):
            return shard_dim(tensor, self._mesh) is not None
        return isinstance(tensor, GroupedTensor | ShardedActivation) and tensor.is_weight

    def _dim(self, weight: Tensor) -> int | None:
        """The sharded dim of a weight, in parts or not."""
        return weight.parts.dim if isinstance(weight, GroupedTensor) else shard_dim(weight, self._mesh)

    def _aliases(self, function: Function, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """The results of a call that makes aliases of a sharded weight (`aliases`), else None."""
        if not args or not isinstance(args[0], Tensor) or not self._is_weight(args[0]):
            return None
        weight, dim, made = args[0], self._dim(args[0]), alias_dims(function, args, kwargs)
        if made is None or dim not in made or not only_first_is_sharded(args, kwargs, _is_sharded):
            return None
        parts = replace(weight.parts, dim=made.index(dim)) if isinstance(weight, GroupedTensor) else None

        def alias(own: Tensor) -> Tensor:
            handle: GroupedTensor | ShardedActivation
            if parts is None:
                handle = ShardedActivation(own, self._mesh, made.index(dim))
            else:
                handle = GroupedTensor(own, self._mesh, parts)
            handle.is_weight = True
            return handle

        return map_tensors(alias, function(self._local(weight), *args[1:], **kwargs))

    def _local(self, weight: Tensor) -> Tensor:
        """The own shard; once per weight, so that the gradients of its aliases are summed before they are its own."""
        if isinstance(weight, GroupedTensor):
            return weight.local
        with torch.enable_grad():  # with its history, even if the first that reads it needs none
            return self._own.get(weight, lambda: local_shard(weight))

    def _contract(self, call: Contraction) -> Tensor:
        """As `_project`, for a contraction with a sharded weight."""
        dim = self._dim(call.weight)
        weight = call.weight.local if isinstance(call.weight, GroupedTensor) else local_shard(call.weight)
        assert dim is not None
        letter = call.of_weight[dim]
        if letter in call.features:
            output = call.run(self.column_input(whole(call.input)), weight)
            at = call.of_output.index(letter)
            if isinstance(call.weight, GroupedTensor):
                return GroupedTensor(output, self._mesh, replace(call.weight.parts, dim=at))
            return crossing.as_sharded(output, self._mesh, at)
        along = call.of_input.index(letter)
        is_local = shard_dim(call.input, self._mesh) == along
        own = local_shard(call.input) if is_local else crossing.shard(whole(call.input), self._mesh, along)
        partial = call.run(own, weight)
        if self._defers_sums and call.is_stacked:
            return PartialSum(partial, self._mesh, is_fresh=True)
        return crossing.reduce_rows(partial, self._mesh)

    def _convolve(self, call: Convolution) -> Tensor:
        """A convolution with any weight."""
        mesh, dim, weight = self._mesh, call.input_dim, call.weight
        parts = weight.parts if isinstance(weight, GroupedTensor) else None
        weight_dim = shard_dim(weight, mesh) if parts is None else parts.dim
        form = call.form(weight_dim, has_parts=parts is not None, size=mesh.size())
        if form == "whole":
            bias = None if call.bias is None else whole(call.bias)
            return call.run(whole(call.input), whole(weight), bias, call.groups)
        kernel = weight.local if isinstance(weight, GroupedTensor) else local_shard(weight)
        if form == "column":
            bias = None if call.bias is None else self._own_bias(call.bias, parts)
            return self._made(call.run(self.column_input(whole(call.input)), kernel, bias, 1), dim, parts)
        own = self._own_channels(call.input, dim, parts)
        if form == "groups":
            bias = None if call.bias is None else self._own_bias(call.bias, parts)
            return self._made(call.run(own, kernel, bias, call.groups // mesh.size()), dim, parts)
        bias = None if call.bias is None else whole(call.bias)
        return call.with_bias(crossing.reduce_rows(call.run(own, kernel, None, 1), mesh), bias)

    def _project_on_parts(self, call: Projection, weight: GroupedTensor) -> Tensor:
        """A column weight in grouped order; so is the result."""
        matrix = weight.local if call.features_dim == 0 else weight.local.t()
        bias = None if call.bias is None else self._own_bias(call.bias, weight.parts)
        output = self._column(call.input, matrix, bias)
        return GroupedTensor(output, self._mesh, replace(weight.parts, dim=output.dim() - 1))

    def _column(self, input: Tensor, matrix: Tensor, bias: Tensor | None) -> Tensor:
        if not is_along(input, self._sequence) or shard_dim(input, self._mesh) != SEQUENCE_DIM:
            return F.linear(self.column_input(whole(input)), matrix, bias)
        local = local_shard(input)
        gathered = self._gathered.get(input, lambda: GatheredSequence(local, self._mesh))
        with gathered.not_saved():
            return F.linear(gathered.whole, matrix, bias)

    def on_parts_of_sum(self, function: Function, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """The result of a call that every rank makes on its part of a sum."""

        def own(tensor: Tensor) -> Tensor:
            if isinstance(tensor, PartialSum):
                tensor.is_fresh = False  # the backward may read it
                return tensor.local
            return self.column_input(tensor) if tensor.is_floating_point() else tensor

        output = function(*map_tensors(own, args), **map_tensors(own, dict(kwargs)))
        return map_tensors(lambda local: PartialSum(local, self._mesh, is_fresh=False), output)

    def column_input(self, tensor: Tensor) -> Tensor:
        """The same for all column weights that read `tensor`, so that their gradients are summed before one reduce."""
        if not tensor.requires_grad or not torch.is_grad_enabled():
            return tensor
        return self._entered.get(tensor, lambda: crossing.enter_columns(tensor, self._mesh))

    def _own_channels(self, input: Tensor, dim: int, parts: Parts | None) -> Tensor:
        if parts is None:
            is_own = shard_dim(input, self._mesh) == dim
            return local_shard(input) if is_own else crossing.shard(whole(input), self._mesh, dim)
        along = replace(parts, dim=dim)
        if isinstance(input, GroupedTensor) and input.parts == along:
            return input.local
        return cut_parts(whole(input), along, self._mesh)

    def _made(self, output: Tensor, dim: int, parts: Parts | None) -> Tensor:
        """What a column weight gave on this rank."""
        if parts is None:
            return crossing.as_sharded(output, self._mesh, dim)
        return GroupedTensor(output, self._mesh, replace(parts, dim=dim))

    def _own_bias(self, bias: Tensor, parts: Parts | None) -> Tensor:
        """What this rank adds to its column features, which may consist of parts."""
        if parts is None:
            return self._column_bias(bias)
        if isinstance(bias, GroupedTensor):
            return bias.local
        return cut_parts(whole(bias), replace(parts, dim=bias.dim() - 1), self._mesh)

    def _column_bias(self, bias: Tensor) -> Tensor:
        if shard_dim(bias, self._mesh) == bias.dim() - 1:
            return local_shard(bias)
        return crossing.shard(whole(bias), self._mesh, bias.dim() - 1)

    def _row_input(self, tensor: Tensor) -> Tensor:
        last = tensor.dim() - 1
        if shard_dim(tensor, self._mesh) == last:
            return local_shard(tensor)
        return crossing.shard(whole(tensor), self._mesh, last)


def _is_sharded(tensor: Tensor) -> bool:
    return isinstance(tensor, DTensor | GroupedTensor | ShardedActivation)


class _ByTensor(Generic[T]):
    """What was made of tensors, once for each of them until it is changed in place."""

    def __init__(self) -> None:
        # id -> (the tensor, so that no id is used twice; its version; what was made of it).
        self._made: dict[int, tuple[Tensor, int, T]] = {}

    def get(self, tensor: Tensor, make: Callable[[], T]) -> T:
        """What was made of a tensor; made now if it is new or changed."""
        known = self._made.get(id(tensor))
        if known is None or known[1] != version_of(tensor):
            known = (tensor, version_of(tensor), make())
            self._made[id(tensor)] = known
        return known[2]
