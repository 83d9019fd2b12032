"""One axis of the mesh as sharded computations see it: how many ranks, which one this is, and their collectives.

`MeshAxis` communicates. Planning has an axis of its own, whose collectives only write down what they would send.
"""

from __future__ import annotations

from typing import Any, Literal, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from lightning_3d.torch_internals import dtensor
from lightning_3d.torch_internals.capture import is_captured

Kind = Literal["all-reduce", "all-gather", "reduce-scatter"]


def sent_bytes(kind: Kind, num_bytes: int, size: int) -> int:
    """Bytes that each of `size` ranks sends of a full tensor of `num_bytes`, by ring algorithms."""
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

    def all_gather(self, local: Tensor, dim: int) -> Tensor:
        """The shards of all ranks one after the other along `dim`; contiguous."""

    def reduce_scatter(self, tensor: Tensor, dim: int) -> Tensor:
        """This rank's shard along `dim` of the sum over the ranks."""

    def of_first_rank(self, tensor: Tensor) -> Tensor:
        """The tensor of the first rank, whose others are about the same; new, contiguous, outside of autograd."""

    def expect_backward(self, result: Tensor, kind: Kind, tensor: Tensor) -> None:
        """Note that the backward of `result` communicates the gradient of a full `tensor`."""


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

    def __deepcopy__(self, memo: dict[int, Any]) -> MeshAxis:
        return self  # the ranks stay the same for a copy of the block that they share

    def all_reduce(self, tensor: Tensor) -> Tensor:
        if is_captured(tensor):
            summed: Tensor = dtensor.all_reduce(tensor, "sum", self._group)
            return summed
        dist.all_reduce(tensor, group=self._group)
        return tensor

    def all_gather(self, local: Tensor, dim: int) -> Tensor:
        local = local.contiguous()
        if is_captured(local):
            every: Tensor = dtensor.all_gather_single(local, 0, self._group)
        else:
            every = local.new_empty(self.size * local.shape[0], *local.shape[1:])
            dist.all_gather_single(every, local, group=self._group)
        return every if dim == 0 else torch.cat(every.chunk(self.size), dim)

    def reduce_scatter(self, tensor: Tensor, dim: int) -> Tensor:
        full = tensor.contiguous() if dim == 0 else torch.cat(tensor.chunk(self.size, dim))
        if is_captured(full):
            summed: Tensor = dtensor.reduce_scatter_single(full, "sum", 0, self._group)
            return summed
        own = full.new_empty(full.shape[0] // self.size, *full.shape[1:])
        dist.reduce_scatter_single(own, full, group=self._group)
        return own

    def of_first_rank(self, tensor: Tensor) -> Tensor:
        if is_captured(tensor):
            return self.all_reduce(tensor if self.rank == 0 else torch.zeros_like(tensor))
        copied = tensor.clone(memory_format=torch.contiguous_format)
        dist.broadcast(copied, group=self._group, group_src=0)
        return copied

    def expect_backward(self, result: Tensor, kind: Kind, tensor: Tensor) -> None:
        """Nothing: what the backward communicates is seen when it runs."""
