"""The differentiable ways between whole and sharded tensors, each with its collective.

A plain tensor inside a block has the same value on every rank of the axis, and so has its gradient. Every function here
keeps that: where ranks contribute different parts of a gradient, its backward sums them.

                        forward              backward
    enter               nothing              all-reduce       (Megatron's f)
    reduce              all-reduce           nothing          (Megatron's g)
    cut                 take one's part      all-gather
    gather              all-gather           take one's part
    gather_sequence     all-gather           reduce-scatter
    scatter             reduce-scatter       all-gather
    of_first_rank       broadcast            nothing
    own_shard           a DTensor's shard    a DTensor of the shard's gradient
"""

from __future__ import annotations

import functools
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_3d.activations.collective_mode import collective, is_kept, unseen_by_checkpoints
from lightning_3d.errors import PlanError
from lightning_3d.sharding.axis import Axis
from lightning_3d.sharding.placement import InterleavedShard, Sharded
from lightning_3d.torch_internals.dispatch import DisableTorchFunction
from lightning_3d.torch_internals.dtensor import local_tensor, spec_of
from lightning_3d.torch_internals.tensors import count_as_parameter, is_referred_to
from lightning_3d.zero.outside_reads import unsharded, whole_of


def refuse_second_order(what: str) -> None:
    """In a backward that has no gradients of gradients.

    Raises:
        PlanError: its own gradient may be asked for.
    """
    if torch.is_grad_enabled():
        raise PlanError(
            f"create_graph=True: gradients of gradients through {what} are not built for tensor parallel. Let"
            " tensor.plan replicate the block's weights, or use tensor_parallel_size=1."
        )


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, axis: Axis) -> Tensor:
        ctx.axis = axis
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        # A copy: autograd may hand the same gradient tensor to other nodes.
        copied = gradient.clone(memory_format=torch.contiguous_format)
        if torch.is_grad_enabled():  # a gradient of this gradient may come
            return reduce(copied, ctx.axis), None
        return ctx.axis.all_reduce(copied), None


class _Reduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, partial: Tensor, axis: Axis, is_kept: bool) -> Tensor:
        ctx.axis = axis
        # In place and not marked dirty: `partial` is a fresh product that neither autograd nor anyone else reads again.
        # `data`, as user code may change the result in place, which autograd refuses for a view made here.
        product = partial.clone(memory_format=torch.contiguous_format) if is_kept else partial.contiguous().data
        return collective(lambda: axis.all_reduce(product), donated=partial)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return _apply(_Enter, gradient, ctx.axis) if torch.is_grad_enabled() else gradient, None, None


class _Cut(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, axis: Axis, dim: int) -> Tensor:
        ctx.axis, ctx.dim = axis, dim
        return tensor.chunk(axis.size, dim)[axis.rank].clone(memory_format=torch.contiguous_format)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        if torch.is_grad_enabled():
            return _apply(_Gather, gradient, ctx.axis, ctx.dim, True), None, None
        return ctx.axis.all_gather(gradient, ctx.dim), None, None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, local: Tensor, axis: Axis, dim: int, is_kept: bool) -> Tensor:
        ctx.axis, ctx.dim = axis, dim
        gather = functools.partial(axis.all_gather, local, dim)
        return collective(gather) if is_kept else gather()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        refuse_second_order("a gathered activation")
        return gradient.chunk(ctx.axis.size, ctx.dim)[ctx.axis.rank].contiguous(), None, None, None


class _GatherSequence(_Gather):  # another backward: what every rank reads has a part of its gradient on each
    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        refuse_second_order("tensor.sequence_parallel")
        return ctx.axis.reduce_scatter(gradient, ctx.dim), None, None, None


class _Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, partial: Tensor, axis: Axis, dim: int) -> Tensor:
        ctx.axis, ctx.dim = axis, dim
        return collective(lambda: axis.reduce_scatter(partial, dim), donated=partial)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        refuse_second_order("tensor.sequence_parallel")
        return ctx.axis.all_gather(gradient, ctx.dim), None, None


class _OfFirstRank(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, axis: Axis) -> Tensor:
        return collective(functools.partial(axis.of_first_rank, tensor.detach()))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


def _apply(function: type[torch.autograd.Function], *args: object) -> Tensor:
    with unseen_by_checkpoints():
        return cast(Tensor, function.apply(*args))


def identity_forward_all_reduce_backward(tensor: Tensor, axis: Axis) -> Tensor:
    """Identity in the forward, all-reduce in the backward (Megatron's f); called once per tensor, whatever reads it.

    Every rank reads the tensor for a result of its own.
    """
    if not tensor.requires_grad:
        return tensor
    entered = _apply(_Enter, tensor, axis)
    axis.expect_backward(entered, "all-reduce", tensor)
    return entered


def reduce(partial: Tensor, axis: Axis) -> Tensor:
    """The sum over the ranks; `partial` must be a fresh result and is overwritten, unless somebody keeps it."""
    return _apply(_Reduce, partial, axis, is_kept())


def cut(tensor: Tensor, axis: Axis, placement: Sharded) -> Tensor:
    """This rank's part of a plain tensor."""
    if not tensor.requires_grad:
        return placement.own(tensor, axis.size, axis.rank)
    interleaved = placement.interleaved(tensor) if isinstance(placement, InterleavedShard) else tensor
    own = _apply(_Cut, interleaved, axis, placement.dim)
    axis.expect_backward(own, "all-gather", tensor)
    return own


def gather(local: Tensor, axis: Axis, placement: Sharded, *, is_kept: bool = True) -> Tensor:
    """A sharded tensor as a plain one in its original order.

    Args:
        is_kept: Whether selective recomputation keeps it.
    """
    full = _apply(_Gather, local, axis, placement.dim, is_kept)
    return placement.deinterleaved(full) if isinstance(placement, InterleavedShard) else full


def gather_sequence(local: Tensor, axis: Axis, dim: int) -> Tensor:
    """The whole sequence as what every rank reads, from its slices; call it once per activation."""
    whole = _apply(_GatherSequence, local, axis, dim, False)
    if local.requires_grad:
        axis.expect_backward(whole, "reduce-scatter", whole)
    return whole


def scatter(partial: Tensor, axis: Axis, dim: int) -> Tensor:
    """This rank's slice along `dim` of the sum over the ranks; `partial` must be a fresh result."""
    own = _apply(_Scatter, partial, axis, dim)
    if partial.requires_grad:
        axis.expect_backward(own, "all-gather", partial)
    return own


def of_first_rank(tensor: Tensor, axis: Axis) -> Tensor:
    """A plain tensor, which may differ by rounding from rank to rank, with the values of the first rank."""
    return _apply(_OfFirstRank, tensor, axis)


class _OwnShard(torch.autograd.Function):
    """`DTensor.to_local` without its cost in the backward.

    A block takes the shard of each of its parameters in every forward. torch 2.13's `to_local` derives the metadata of
    each gradient anew, which takes 60 of the 90 us of its backward; here they are the parameter's own.
    """

    @staticmethod
    def forward(ctx: Any, tensor: DTensor) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.spec = spec_of(tensor)
        local = local_tensor(tensor)
        ctx.stride = local.stride()
        return local.view_as(local)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor | None) -> DTensor | None:
        if gradient is None:
            return None
        refuse_second_order("sharded weights")
        # Like autograd with plain parameters: a gradient that another node gets, too, is copied, as it becomes `.grad`.
        if gradient.stride() != ctx.stride or is_referred_to(gradient):
            made = torch.empty_strided(gradient.shape, ctx.stride, dtype=gradient.dtype, device=gradient.device)
            gradient = made.copy_(gradient)
        return DTensor(gradient, ctx.spec, requires_grad=False)


def own_shard(tensor: DTensor) -> Tensor:
    """The local part of a sharded or replicated tensor; its gradient is that part of the tensor's gradient.

    Parameters of which ZeRO stage 3 has left each replica a share are gathered for it.
    """
    if whole_of(tensor) is not None:
        with DisableTorchFunction():
            tensor = unsharded(tensor)
    local = _apply(_OwnShard, tensor)
    if isinstance(tensor, nn.Parameter):
        count_as_parameter(local)  # what a block's code finds is an nn.Parameter to it
    return local
