"""The pipeline stages of a model, which send each other values of its parameters and buffers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_3d.checkpoint.box import full_value
from lightning_3d.distributed.mesh import Mesh
from lightning_3d.planning.plan import Plan
from lightning_3d.ranks.rendezvous import Rendezvous
from lightning_3d.sharding.placement import InterleavedShard, order_of
from lightning_3d.torch_internals.dispatch import DisableTorchFunctionSubclass


@dataclass(frozen=True, kw_only=True, eq=False)
class PipelineStages:
    """The stages of a model, which send each other values between steps and in steps that run inline.

    Args:
        ranks: Those that have a part of the model among them.
    """

    plan: Plan
    mesh: Mesh
    device: torch.device
    ranks: Sequence[int]
    rendezvous: Rendezvous

    @property
    def are_met(self) -> bool:
        """Whether the present code runs on all stages alike."""
        return self.are_between_steps or self.plan.inline is not None

    @property
    def are_between_steps(self) -> bool:
        """Whether a stage that calls `values` alone raises."""
        return not self.rendezvous.is_agreed

    def holders(self, fqn: str) -> frozenset[int]:
        """Indices on the pp axis of the ranks that have a parameter or buffer."""
        return frozenset(self.plan.state_ranks.get(fqn, range(self.mesh.shape.pp)))

    def values(self, tensors: Sequence[Tensor], what: str) -> list[Tensor]:
        """The full values on every rank of tensors that some stages lack, the others as they are; all ranks call it."""
        self.rendezvous.sync_check(self.ranks, f"{what} of tensors of several pipeline stages")
        with torch.no_grad(), DisableTorchFunctionSubclass():
            return [
                full_on_all(tensor, order_of(tensor), stages, self.mesh, self.device)
                if 0 < len(stages) < self.mesh.shape.pp
                else tensor
                for tensor, stages in zip(tensors, holders_of(tensors, self.mesh), strict=True)
            ]


def holders_of(tensors: Iterable[Tensor], mesh: Mesh) -> list[list[int]]:
    """By tensor the indices on the pp axis of the ranks that have it, or a part of it; every rank calls it."""
    own = [not tensor.is_meta for tensor in tensors]
    everyone = [own] * mesh.shape.pp
    if mesh.shape.pp > 1:
        dist.all_gather_object(everyone, own, group=mesh.group("pp"))
    return [[i for i, is_there in enumerate(are_there) if is_there] for are_there in zip(*everyone, strict=True)]


def full_on_all(
    tensor: Tensor, parts: InterleavedShard | None, stages: Sequence[int], mesh: Mesh, device: torch.device
) -> Tensor:
    """A copy of the full value of a tensor on every rank; every rank calls it.

    Args:
        parts: Those of a tensor in grouped order; the copy is in its original one.
        stages: Indices on the pp axis of the ranks that have it.
    """
    if tensor.is_meta:
        full = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
    else:
        full = full_value(tensor.detach().to(device))
        full = (full if parts is None else parts.deinterleaved(full)).clone(memory_format=torch.contiguous_format)
    if mesh.shape.pp > len(stages) and full.numel():
        dist.broadcast(full.view(-1).view(torch.uint8), group=mesh.group("pp"), group_src=stages[0])  # of any dtype
    return full
