"""Running calls with tensors in grouped order on each rank's own shards, as `grouped` decides."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from lightning_3d.errors import PlanError
from lightning_3d.tensor.parts import Parts
from lightning_3d.tensor.rules.function import Function, destination, function_name, map_tensors, tensors_in
from lightning_3d.tensor.rules.grouped import (
    Cuts,
    Drops,
    GroupedTensor,
    Keeps,
    Opens,
    Reads,
    Reshapes,
    as_grouped_call,
    cut_dim_of,
)
from lightning_3d.tensor.run import crossing
from lightning_3d.tensor.run.partial_sums import PartialSum
from lightning_3d.tensor.run.randomness import dropout_shard
from lightning_3d.tensor.run.sharded_activation import ShardedActivation


def call_on_parts(
    function: Function,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    mesh: DeviceMesh,
    generic: Callable[..., Any],
) -> Any:
    """Run a call that has a tensor in grouped order among its arguments.

    Args:
        function: What is called.
        args: Its positional arguments.
        kwargs: Its keyword arguments.
        mesh: The tp axis.
        generic: Runs a call on evenly sharded tensors, given as function, args and kwargs.

    Raises:
        PlanError: the call changes such a tensor in place.
    """
    match as_grouped_call(function, args, kwargs, _parts_of, _is_plain):
        case None:
            if isinstance(destination(function, args, kwargs), GroupedTensor):
                raise PlanError(f"{function_name(function)} changes a sharded tensor in place and has no sharded form")
            args, kwargs = map_tensors(whole, (tuple(args), dict(kwargs)))
            return function(*args, **kwargs)
        case Reads():
            return function(*args, **kwargs)
        case Cuts() as call:
            pieces = _cut(args[0], call, mesh)
            return pieces[0] if call.is_single else tuple(pieces)
        case Opens() as call:
            opened = crossing.as_sharded(args[0].local.reshape(call.local_shape), mesh, call.dim)
            return generic(Tensor.reshape, (opened, call.result), {})
        case Reshapes() as call:
            return reshaped(args[0].local, mesh, call)
        case Drops() as call:
            if not call.dropout.training:
                return call.dropout.input
            dropped = dropout_shard(args[0].local, call.dropout.p, mesh.get_local_rank())
            return GroupedTensor(dropped, mesh, call.parts)
        case Keeps() as call:
            first, num_dims = args[0], max(tensor.dim() for tensor in tensors_in((args, kwargs)))
            args, kwargs = map_tensors(
                lambda tensor: _own(tensor, call.parts, num_dims, mesh), (tuple(args), dict(kwargs))
            )
            output = function(*args, **kwargs)
            return first if call.is_in_place else GroupedTensor(output, mesh, call.parts)


def reshaped(local: Tensor, mesh: DeviceMesh, call: Reshapes) -> GroupedTensor:
    """A shard in the shape that the call asks for."""
    return GroupedTensor(local.reshape(call.local_shape), mesh, call.parts)


def whole(tensor: Tensor) -> Tensor:
    """A tensor that is sharded in any way as a plain one in its original order; a plain one as it is."""
    if isinstance(tensor, GroupedTensor):
        return tensor.parts.ungrouped(crossing.gather(crossing.as_sharded(tensor.local, tensor.mesh, tensor.parts.dim)))
    if isinstance(tensor, PartialSum):
        return tensor.reduced()
    return crossing.gather(tensor) if isinstance(tensor, DTensor | ShardedActivation) else tensor


def cut_parts(tensor: Tensor, parts: Parts, mesh: DeviceMesh) -> Tensor:
    """This rank's slice of every part of a plain tensor."""
    return crossing.shard(parts.grouped(tensor), mesh, parts.dim)


def _cut(tensor: GroupedTensor, call: Cuts, mesh: DeviceMesh) -> list[Tensor]:
    pieces: list[Tensor] = []
    for parts, start in zip(call.pieces, call.starts, strict=True):
        local = tensor.local.narrow(parts.dim, start // parts.num_ranks, sum(parts.local_sizes))
        is_whole = len(parts.sizes) == 1
        pieces.append(crossing.as_sharded(local, mesh, parts.dim) if is_whole else GroupedTensor(local, mesh, parts))
    return pieces


def _own(tensor: Tensor, parts: Parts, num_dims: int, mesh: DeviceMesh) -> Tensor:
    if isinstance(tensor, GroupedTensor):
        return tensor.local
    dim = cut_dim_of(tensor, parts, num_dims)
    if dim is None:
        return crossing.enter_columns(tensor, mesh)  # every rank has a part of its gradient
    return cut_parts(tensor, Parts(dim=dim, sizes=parts.sizes, num_ranks=parts.num_ranks), mesh)


def _parts_of(tensor: Tensor) -> Parts | None:
    return tensor.parts if isinstance(tensor, GroupedTensor) else None


def _is_plain(tensor: Tensor) -> bool:
    return not isinstance(tensor, DTensor | ShardedActivation | GroupedTensor)
