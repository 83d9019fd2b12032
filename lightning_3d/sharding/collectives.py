"""The one differentiable way from any placement to any other.

    from        to            forward           backward
    Replicate   PartialGrad   nothing           all-reduce          Megatron's f
    Partial     Replicate     all-reduce        nothing             Megatron's g
    Replicate   Shard         one's own part    all-gather
    Shard       Replicate     all-gather        one's own part
    Shard       PartialGrad   all-gather        reduce-scatter
    Partial     Shard         reduce-scatter    all-gather
    Shard(a)    Shard(b)      all-to-all        all-to-all

The backward is the way back between the placements of gradients (`placement_of_gradient`). So a gradient is
redistributed as any tensor is, and has a gradient, too. PartialGrad is ``REPLICATE_PARTIAL_GRAD``.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor

from lightning_3d.activations.collective_mode import collective, is_kept, unseen_by_checkpoints
from lightning_3d.sharding.axis import Axis, Kind, sent_bytes
from lightning_3d.sharding.pieces import num_exchanged, num_padded
from lightning_3d.sharding.placement import (
    REPLICATE,
    REPLICATE_PARTIAL_GRAD,
    InterleavedShard,
    Partial,
    Placement,
    Replicate,
    Shard,
    Sharded,
    lengths_of,
)
from lightning_3d.sharding.sealed_tensor import SealedTensor
from lightning_3d.torch_internals.dispatch import DisableTorchFunction


def redistribute(tensor: Tensor, axis: Axis, source: Placement, target: Placement, *, saves: bool = True) -> Tensor:
    """This rank's part of a tensor as it lies in `source`, as that in `target`.

    Args:
        tensor: Its part in `source`. A partial one must be a fresh result, and is overwritten unless somebody keeps it.
        saves: Whether selective recomputation may save the result of a collective.
    """
    if source == target:
        return tensor
    if isinstance(tensor, SealedTensor):
        return _of_sealed(tensor, axis, source, target, saves=saves)
    if isinstance(source, Replicate) and not tensor.requires_grad:
        return tensor if isinstance(target, Replicate) else _own(tensor, axis, target)
    arguments = tensor, axis, source, target, saves, not is_kept()
    with unseen_by_checkpoints():
        moved = cast(Tensor, _Redistribute.apply(*arguments))  # type: ignore[no-untyped-call]  # torch 2.13
    if tensor.requires_grad:
        axis.expect_backward(moved, tensor, source, target)
    return moved


def _of_sealed(tensor: SealedTensor, axis: Axis, source: Placement, target: Placement, *, saves: bool) -> Tensor:
    """The same where another axis cuts this rank's part: of its own part there.

    It is of all of it where that dim changes, and where parts become uneven: ranks with other shapes may cut them in
    other ways on the other axis, and then could not go on together.
    """
    other, run = tensor.sharded, functools.partial(redistribute, axis=axis, source=source, target=target, saves=saves)
    is_same_dim = any(isinstance(at, Sharded) and at.dim == other.placement.dim for at in (source, target))
    if is_same_dim or lengths_of(target) is not None:
        with DisableTorchFunction():
            return run(redistribute(other.own(), other.axis, other.placement, REPLICATE))
    return tensor.on_own(run)


def kind_of(source: Placement, target: Placement) -> Kind | None:
    """The collective on a way; None if there is none."""
    if isinstance(source, Replicate) or source == target:
        return None
    if isinstance(source, Partial):
        return "all-reduce" if isinstance(target, Replicate) else "reduce-scatter"
    if not isinstance(target, Sharded):
        return "all-gather"
    is_in_parts = isinstance(source, InterleavedShard) or isinstance(target, InterleavedShard)
    return "all-gather" if is_in_parts and source.dim == target.dim else "all-to-all"


def bytes_sent(shape: Sequence[int], itemsize: int, source: Placement, target: Placement, size: int) -> int:
    """Bytes that a rank sends on a way, the one that sends most; 0 if there is no collective.

    Args:
        shape: Of the full tensor.
    """
    kind = kind_of(source, target)
    if kind == "all-to-all":
        return num_exchanged(shape, _even(source), _even(target), size) * itemsize
    return 0 if kind is None else sent_bytes(kind, num_padded(shape, source, target) * itemsize, size)


def placement_of_gradient(placement: Placement) -> Placement:
    """How the gradient of a tensor lies."""
    if isinstance(placement, Replicate):
        return Partial() if placement.sums_gradients else REPLICATE
    return REPLICATE_PARTIAL_GRAD if isinstance(placement, Partial) else placement


class _Redistribute(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, tensor: Tensor, axis: Axis, source: Placement, target: Placement, saves: bool, donates: bool
    ) -> Tensor:
        ctx.axis, ctx.source, ctx.target = axis, source, target
        if isinstance(source, Replicate):
            if isinstance(target, Replicate):
                return tensor.view_as(tensor)
            return _own(tensor, axis, target).clone(memory_format=torch.contiguous_format)
        operand = tensor
        if kind_of(source, target) == "all-reduce":
            # In place and not marked dirty: `tensor` is a fresh product that neither autograd nor anyone else reads
            # again. `data`, as user code may change the result in place, which autograd refuses for a view made here.
            operand = tensor.contiguous().data if donates else tensor.clone(memory_format=torch.contiguous_format)
        make = functools.partial(_moved, operand, axis, source, target)
        return collective(make, donated=tensor if isinstance(source, Partial) else None) if saves else make()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        source, target = placement_of_gradient(ctx.target), placement_of_gradient(ctx.source)
        if kind_of(source, target) == "all-reduce":  # a copy: autograd may hand the same tensor to other nodes
            gradient = gradient.clone(memory_format=torch.contiguous_format)
        if torch.is_grad_enabled():  # a gradient of this gradient may come
            return redistribute(gradient, ctx.axis, source, target, saves=False), *[None] * 5
        if isinstance(source, Replicate):
            is_whole = isinstance(target, Replicate)
            return gradient if is_whole else _own(gradient, ctx.axis, target).contiguous(), *[None] * 5
        return _moved(gradient, ctx.axis, source, target), *[None] * 5


def _moved(tensor: Tensor, axis: Axis, source: Placement, target: Placement) -> Tensor:
    """The result of a collective; an all-reduce overwrites the tensor."""
    if isinstance(source, Partial):
        if isinstance(target, Replicate):
            return axis.all_reduce(tensor)
        return axis.reduce_scatter(_interleaved(tensor, target), _even(target))
    if isinstance(target, Replicate):
        return _deinterleaved(axis.all_gather(tensor, _even(source)), source)
    if kind_of(source, target) == "all-gather":
        return _own(_moved(tensor, axis, source, REPLICATE), axis, target).contiguous()
    return _deinterleaved(axis.all_to_all(_interleaved(tensor, target), _even(source), _even(target)), source)


def _own(full: Tensor, axis: Axis, target: Placement) -> Tensor:
    assert isinstance(target, Sharded)
    return target.own(full, axis.size, axis.rank)


def _even(placement: Placement) -> Shard:
    """The shards of a tensor whose parts are in grouped order."""
    assert isinstance(placement, Sharded)
    return placement if isinstance(placement, Shard) else Shard(placement.dim)


def _interleaved(full: Tensor, placement: Placement) -> Tensor:
    return placement.interleaved(full) if isinstance(placement, InterleavedShard) else full


def _deinterleaved(full: Tensor, placement: Placement) -> Tensor:
    return placement.deinterleaved(full) if isinstance(placement, InterleavedShard) else full


def of_first_rank(tensor: Tensor, axis: Axis) -> Tensor:
    """A plain tensor, which may differ by rounding from rank to rank, with the values of the first rank."""
    if isinstance(tensor, SealedTensor):
        return tensor.on_own(functools.partial(of_first_rank, axis=axis))
    with unseen_by_checkpoints():
        return cast(Tensor, _OfFirstRank.apply(tensor, axis))  # type: ignore[no-untyped-call]  # torch 2.13


class _OfFirstRank(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, tensor: Tensor, axis: Axis) -> Tensor:
        return collective(functools.partial(axis.of_first_rank, tensor.detach()))

    @staticmethod
    def backward(ctx: object, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None
