"""Collectives of the data-parallel ranks."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_3d.distributed.mesh import Mesh

Wait = Callable[[], Tensor]
"""Waits for a collective and returns its result."""


class DPComm:
    """The ranks that train replicas of one model, seen from one of them.

    With hybrid sharding groups of them share the training state, and each such group holds all of it.
    """

    def __init__(self, mesh: Mesh) -> None:
        self.group = mesh.group("state")
        self.size = self.group.size()
        self.num_shards, self.shard_rank = mesh.num_shards, mesh.state_rank % mesh.num_shards
        self._shards = mesh.sliced("dp_shard").get_group() if mesh.is_hybrid else self.group
        self._copies = mesh.sliced("dp_replicate").get_group() if mesh.is_hybrid else None  # ranks with the same shard
        self._is_gloo = dist.get_backend(self.group) == "gloo"

    def all_reduce(self, tensor: Tensor) -> Wait:
        """Begin to sum a tensor of shape (1, n) over the ranks, in place; the result has shape (n,)."""
        work = dist.all_reduce(tensor, group=self.group, async_op=True)
        return _Waiting(work, lambda: tensor[0])

    def reduce_scatter(self, tensor: Tensor) -> Wait:
        """Begin to sum a tensor of shape (shards, n) over the ranks; the result is this rank's row, of shape (n,)."""
        if self._is_gloo:  # whose reduce-scatter is an all-reduce, which sends twice as much
            received = torch.empty_like(tensor)
            work = dist.all_to_all_single(received, tensor, group=self._shards, async_op=True)
            return _Waiting(work, lambda: self._over_copies(received.sum(0)))
        own = tensor.new_empty(tensor.shape[1:])
        work = dist.reduce_scatter_single(own, tensor, group=self._shards, async_op=True)
        return _Waiting(work, lambda: self._over_copies(own))

    def _over_copies(self, own: Tensor) -> Tensor:
        """Sum a shard over the ranks that have the same one."""
        if self._copies is not None:
            dist.all_reduce(own, group=self._copies)
        return own

    def reduce(self, tensor: Tensor, owner: int) -> Wait:
        """Begin to sum a tensor of shape (1, n) over the ranks; its owner's result is the sum, of shape (n,).

        Args:
            owner: Index among the ranks that share the training state.
        """
        work = dist.reduce(tensor, group=self._shards, group_dst=owner, async_op=True)
        return _Waiting(work, lambda: self._over_copies(tensor[0]) if self.shard_rank == owner else tensor[0])

    def broadcast(self, tensor: Tensor, owner: int) -> Wait:
        """Begin to give the ranks that share the training state the values of one of them, in place."""
        return _Waiting(dist.broadcast(tensor, group=self._shards, group_src=owner, async_op=True), lambda: tensor)

    def all_gather(self, result: Tensor, own: Tensor) -> Wait:
        """Begin to gather every rank's tensor of shape (n,) into one of shape (shards, n); `own` may be its row."""
        work = dist.all_gather_single(result.view(-1), own.view(-1), group=self._shards, async_op=True)
        return _Waiting(work, lambda: result)


class _Waiting:
    """A collective under way."""

    def __init__(self, work: dist.Work | None, result: Callable[[], Tensor]) -> None:
        assert work is not None
        self._work, self._result = work, result

    def __call__(self) -> Tensor:
        self._work.wait()
        return self._result()
