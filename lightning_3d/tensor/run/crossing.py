"""The differentiable crossings between replicated (plain) tensors and shards, each with its collective.

A plain tensor inside a block has the same value on every tp rank, and so has its gradient. Every function here keeps
that: where ranks contribute different parts of a gradient, its backward sums them.

                        forward              backward
    enter_columns       nothing              all-reduce       (Megatron's f)
    reduce_rows         all-reduce           nothing          (Megatron's g)
    shard               take one's shard     all-gather
    replicate           nothing              all-reduce or all-gather, as the gradient needs
    gather              all-gather           take one's shard
    gather_sequence     all-gather           reduce-scatter
    scatter_rows        reduce-scatter       all-gather
"""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from lightning_3d.tensor.run.collectives import all_reduced
from lightning_3d.tensor.run.own_shard import own_shard
from lightning_3d.tensor.run.second_order import refuse_second_order
from lightning_3d.tensor.run.sharded_activation import ShardedActivation


class _EnterColumns(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        # A copy: autograd may hand the same gradient tensor to other nodes.
        copied = gradient.clone(memory_format=torch.contiguous_format)
        if torch.is_grad_enabled():  # a gradient of this gradient may come
            return _apply(_ReduceRows, copied, ctx.group), None
        return all_reduced(copied, ctx.group), None


class _ReduceRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, partial: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        # In place and not marked dirty: `partial` is a fresh product that neither autograd nor anyone else reads again.
        # `data`, as user code may change the result in place, which autograd refuses for a view made here.
        return all_reduced(partial.contiguous().data, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return _apply(_EnterColumns, gradient, ctx.group) if torch.is_grad_enabled() else gradient, None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: DTensor) -> Tensor:
        ctx.mesh, ctx.dim = tensor.device_mesh, None
        if isinstance(placement_of(tensor), Shard):
            ctx.dim = cast(Shard, placement_of(tensor)).dim
        return tensor.redistribute(placements=[Replicate()]).to_local().data  # as above: not a view

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> DTensor:
        refuse_second_order("a gathered activation")
        # Of a partial sum every rank's part has the full gradient.
        full = DTensor.from_local(gradient, ctx.mesh, [Replicate()], run_check=False)
        return full if ctx.dim is None else full.redistribute(placements=[Shard(ctx.dim)])


class _GatherSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, local: Tensor, mesh: DeviceMesh, dim: int) -> Tensor:
        ctx.mesh, ctx.dim = mesh, dim
        return _all_gather(local, mesh, dim)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        refuse_second_order("tensor.sequence_parallel")
        return _reduce_scatter(gradient, ctx.mesh, ctx.dim), None, None


class _ScatterRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, partial: Tensor, mesh: DeviceMesh, dim: int) -> Tensor:
        ctx.mesh, ctx.dim = mesh, dim
        return _reduce_scatter(partial, mesh, dim)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        refuse_second_order("tensor.sequence_parallel")
        return _all_gather(gradient, ctx.mesh, ctx.dim), None, None


def _all_gather(local: Tensor, mesh: DeviceMesh, dim: int) -> Tensor:
    sharded = DTensor.from_local(local.contiguous(), mesh, [Shard(dim)], run_check=False)
    return sharded.redistribute(placements=[Replicate()]).to_local()


def _reduce_scatter(partial: Tensor, mesh: DeviceMesh, dim: int) -> Tensor:
    tensor = DTensor.from_local(partial.contiguous(), mesh, [Partial()], run_check=False)
    return tensor.redistribute(placements=[Shard(dim)]).to_local()


def _apply(function: type[torch.autograd.Function], *args: object) -> Tensor:
    return cast(Tensor, function.apply(*args))


def enter_columns(tensor: Tensor, mesh: DeviceMesh) -> Tensor:
    """A plain activation as the input of column weights; call it once per activation, whatever uses it then."""
    return _apply(_EnterColumns, tensor, mesh.get_group()) if tensor.requires_grad else tensor


def reduce_rows(partial: Tensor, mesh: DeviceMesh) -> Tensor:
    """The sum over tp of what a row weight gave on each rank; `partial` must be a fresh result and is overwritten."""
    return _apply(_ReduceRows, partial, mesh.get_group())


def slice_sequence(tensor: Tensor, mesh: DeviceMesh, dim: int) -> ShardedActivation:
    """The own slice of a plain activation; a copy, so that nothing keeps the rest of it."""
    return as_sharded(shard(tensor, mesh, dim).clone(), mesh, dim)


def gather_sequence(local: Tensor, mesh: DeviceMesh, dim: int) -> Tensor:
    """The whole sequence as the input of column weights, from its slices; call it once per activation."""
    return _apply(_GatherSequence, local, mesh, dim)


def scatter_rows(partial: Tensor, mesh: DeviceMesh, dim: int) -> ShardedActivation:
    """The sum over tp of what a row weight gave on each rank, cut along the sequence."""
    return as_sharded(_apply(_ScatterRows, partial, mesh, dim), mesh, dim)


def replicate(tensor: Tensor, mesh: DeviceMesh) -> DTensor:
    """A plain tensor as an operand beside sharded ones; 0-d CPU tensors move to the mesh's device."""
    return DTensor.from_local(tensor, mesh, [Replicate()], run_check=False)


def shard(tensor: Tensor, mesh: DeviceMesh, dim: int) -> Tensor:
    """Take the own part of a plain tensor along `dim`, which the size of tp divides."""
    if not tensor.requires_grad:
        return tensor.chunk(mesh.size(), dim)[mesh.get_local_rank()]
    return replicate(tensor, mesh).redistribute(placements=[Shard(dim)]).to_local(grad_placements=[Shard(dim)])


def gather(tensor: Tensor) -> Tensor:
    """A sharded or partial tensor as a plain one; a plain one stays what it is."""
    if isinstance(tensor, ShardedActivation):
        tensor = as_dtensor(tensor)
    return _apply(_Gather, tensor) if isinstance(tensor, DTensor) else tensor


def as_sharded(local: Tensor, mesh: DeviceMesh, dim: int) -> ShardedActivation:
    """Equal shards along `dim` as one tensor."""
    return ShardedActivation(local, mesh, dim)


def as_dtensor(activation: ShardedActivation) -> DTensor:
    """The same for a call that DTensor runs."""
    placements = [Shard(activation.shard_dim)]
    return DTensor.from_local(activation.own_shard(), activation.mesh, placements, run_check=False)


def local_shard(tensor: Tensor) -> Tensor:
    """Take the own part of a sharded tensor; its gradient is the own part of the tensor's gradient."""
    if isinstance(tensor, ShardedActivation):
        return tensor.own_shard()
    assert isinstance(tensor, DTensor)
    return own_shard(tensor)


def placement_of(tensor: DTensor) -> Placement:
    """The placement on the tp axis."""
    return tensor.placements[0]


def shard_dim(tensor: object, mesh: DeviceMesh) -> int | None:
    """The dim that a tensor is evenly sharded on; None for a plain tensor or any other placement."""
    if isinstance(tensor, ShardedActivation):
        return tensor.shard_dim
    if not isinstance(tensor, DTensor):
        return None
    placement = placement_of(tensor)
    if not isinstance(placement, Shard) or tensor.shape[placement.dim] % mesh.size():
        return None
    return placement.dim
