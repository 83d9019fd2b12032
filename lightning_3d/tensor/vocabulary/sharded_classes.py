"""Classes that are sharded over the tp axis: which are this rank's, and logits of all of them."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from lightning_3d.sharding.axis import MeshAxis
from lightning_3d.sharding.collectives import redistribute
from lightning_3d.sharding.placement import REPLICATE, Shard, chunked


def shard_bounds(num_rows: int, mesh: DeviceMesh) -> tuple[int, int]:
    """First row and the one after the last of this rank's shard, as DTensor cuts `num_rows` that need not divide."""
    size, rank = mesh.size(), mesh.get_local_rank()
    bounds = chunked(0, num_rows, size).bounds(num_rows, size)
    return bounds[rank], bounds[rank + 1]


@dataclass(frozen=True, slots=True)
class ShardedClasses:
    """Classes that are sharded over the tp axis, as DTensor cuts them."""

    num: int
    axis: MeshAxis

    @property
    def mesh(self) -> DeviceMesh:
        """The tp axis."""
        return self.axis.mesh

    @property
    def most(self) -> int:
        """The number of classes on the rank that has most."""
        return -(-self.num // self.axis.size)

    def own(self, logits: Tensor) -> Tensor:
        """This rank's part of ``[..., classes]``, contiguous."""
        return self._placement(logits).own(logits, self.axis.size, self.axis.rank).contiguous()

    def gathered(self, local: Tensor) -> Tensor:
        """Logits ``[..., own classes]`` as ``[..., classes]``, equal on all ranks; their gradients are equal, too."""
        return redistribute(local, self.axis, self._placement(local), REPLICATE, saves=False)

    def _placement(self, logits: Tensor) -> Shard:
        return chunked(logits.dim() - 1, self.num, self.axis.size)
