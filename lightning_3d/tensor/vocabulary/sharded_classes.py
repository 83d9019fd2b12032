"""Classes that are sharded over the tp axis: which are this rank's, and logits of all of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from lightning_3d.activations.collective_mode import unseen_by_checkpoints


def shard_bounds(num_rows: int, mesh: DeviceMesh) -> tuple[int, int]:
    """First row and the one after the last of this rank's shard, as DTensor cuts `num_rows` that need not divide."""
    length = -(-num_rows // mesh.size())
    start = min(mesh.get_local_rank() * length, num_rows)
    return start, min(start + length, num_rows)


@dataclass(frozen=True, slots=True)
class ShardedClasses:
    """Classes that are sharded over the tp axis, as DTensor cuts them."""

    num: int
    mesh: DeviceMesh

    @property
    def bounds(self) -> tuple[int, int]:
        """This rank's first class, and the one after its last."""
        return shard_bounds(self.num, self.mesh)

    @property
    def most(self) -> int:
        """The number of classes on the rank that has most."""
        return -(-self.num // self.mesh.size())

    def own(self, logits: Tensor) -> Tensor:
        """This rank's part of ``[..., classes]``, contiguous."""
        start, stop = self.bounds
        return logits[..., start:stop].contiguous()

    def gathered(self, local: Tensor) -> Tensor:
        """Logits ``[..., own classes]`` as ``[..., classes]``, equal on all ranks; their gradients are equal, too."""
        with unseen_by_checkpoints():
            return cast(Tensor, _Gather.apply(local, self))  # type: ignore[no-untyped-call]  # torch 2.13


class _Gather(torch.autograd.Function):
    """Logits of own classes -> logits of all; a collective of the tp axis in the forward alone."""

    @staticmethod
    def forward(ctx: Any, local: Tensor, classes: ShardedClasses) -> Tensor:
        ctx.classes = classes
        part = local.movedim(-1, 0)
        padded = part.new_zeros(classes.most, *part.shape[1:])
        padded[: len(part)] = part
        every = padded.new_empty(classes.most * classes.mesh.size(), *part.shape[1:])
        dist.all_gather_single(every, padded, group=classes.mesh.get_group())
        return every[: classes.num].movedim(0, -1).contiguous()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return ctx.classes.own(gradient), None
