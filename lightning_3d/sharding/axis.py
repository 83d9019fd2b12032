"""One axis of the mesh as sharded computations see it: how many ranks, which one this is, and their collectives.

`MeshAxis` communicates. Planning has an axis of its own, whose collectives only write down what they would send.
"""

from __future__ import annotations

import math
from typing import Literal, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from lightning_3d.sharding.pieces import by_rank, exchanged, in_order, padded
from lightning_3d.sharding.placement import Placement, Shard, full_shape
from lightning_3d.torch_internals import dtensor
from lightning_3d.torch_internals.capture import is_captured

Kind = Literal["all-reduce", "all-gather", "reduce-scatter", "all-to-all"]


def sent_bytes(kind: Kind, num_bytes: int, size: int) -> int:
    """Bytes that each of `size` ranks sends of a full tensor of `num_bytes`, by ring algorithms; no all-to-all."""
    return num_bytes * (size - 1) // size * (2 if kind == "all-reduce" else 1)


class Axis(Protocol):
    """An axis of the mesh."""

    @property
    def size(self) -> int:
        """The number of ranks."""

    @property
    def rank(self) -> int:
        """This rank's position, from 0."""

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """The sum over the ranks; a contiguous `tensor` that nobody else reads, as it may be overwritten."""

    def all_gather(self, local: Tensor, at: Shard) -> Tensor:
        """The shards of all ranks one after the other; contiguous."""

    def reduce_scatter(self, tensor: Tensor, at: Shard) -> Tensor:
        """This rank's shard of the sum over the ranks; contiguous."""

    def all_to_all(self, local: Tensor, source: Shard, target: Shard) -> Tensor:
        """This rank's shard of the same tensor as it is cut then; contiguous."""

    def of_first_rank(self, tensor: Tensor) -> Tensor:
        """The tensor of the first rank, whose others are about the same; new, contiguous, outside of autograd."""

    def expect_backward(self, result: Tensor, local: Tensor, source: Placement, target: Placement) -> None:
        """Note that `result` was made of `local`, so that the backward takes a gradient from `target` to `source`."""


class MeshAxis:
    """An `Axis` that is a one-dimensional device mesh.

    Collectives run in place on eager tensors, which is faster; where a block is captured for a compiler they are
    functions, as tracing needs collectives that return new tensors.

    Args:
        mesh: With one dimension.
    """

    def __init__(self, mesh: DeviceMesh) -> None:
        self.mesh = mesh
        self.size, self.rank, self._group = mesh.size(), mesh.get_local_rank(), mesh.get_group()

    def __deepcopy__(self, memo: dict[int, object]) -> MeshAxis:
        return self  # the ranks stay the same for a copy of the block that they share

    def all_reduce(self, tensor: Tensor) -> Tensor:
        if is_captured(tensor):
            summed: Tensor = dtensor.all_reduce(tensor, "sum", self._group)
            return summed
        dist.all_reduce(tensor, group=self._group)
        return tensor

    def all_gather(self, local: Tensor, at: Shard) -> Tensor:
        local = padded(local, at)
        if is_captured(local):
            every: Tensor = dtensor.all_gather_single(local, 0, self._group)
        else:
            every = local.new_empty(self.size * local.shape[0], *local.shape[1:])
            dist.all_gather_single(every, local, group=self._group)
        return in_order(every, at, self.size)

    def reduce_scatter(self, tensor: Tensor, at: Shard) -> Tensor:
        full = by_rank(tensor, at, self.size)
        if is_captured(full):
            summed: Tensor = dtensor.reduce_scatter_single(full, "sum", 0, self._group)
        else:
            summed = full.new_empty(full.shape[0] // self.size, *full.shape[1:])
            dist.reduce_scatter_single(summed, full, group=self._group)
        return summed if at.lengths is None else summed.narrow(at.dim, 0, at.lengths[self.rank]).contiguous()

    def all_to_all(self, local: Tensor, source: Shard, target: Shard) -> Tensor:
        shape = full_shape(local.shape, source, self.size)
        sent, shapes = exchanged(shape, source, target, self.size, self.rank)
        pieces = [piece.reshape(-1) for piece in local.split(sent, target.dim)]
        lengths, counts = [math.prod(shape) for shape in shapes], [piece.numel() for piece in pieces]
        flat = torch.cat(pieces)
        if is_captured(flat):
            got: Tensor = dtensor.all_to_all_single(flat, lengths, counts, self._group)
        else:
            got = flat.new_empty(sum(lengths))
            dist.all_to_all_single(got, flat, lengths, counts, group=self._group)
        came = [piece.view(shape) for piece, shape in zip(got.split(lengths), shapes, strict=True)]
        return torch.cat(came, source.dim)

    def of_first_rank(self, tensor: Tensor) -> Tensor:
        if is_captured(tensor):
            return self.all_reduce(tensor if self.rank == 0 else torch.zeros_like(tensor))
        copied = tensor.clone(memory_format=torch.contiguous_format)
        dist.broadcast(copied, group=self._group, group_src=0)
        return copied

    def expect_backward(self, result: Tensor, local: Tensor, source: Placement, target: Placement) -> None:
        """Nothing: what the backward communicates is seen when it runs."""
