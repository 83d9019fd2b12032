"""Buffers that steps change, as running statistics, are those of the first replica in all of them, as under DDP.

Each replica sees data of its own, so that its buffers would drift from the others', and with them what the replicas
compute in evaluation, or in training where a step reads them. So before a step the first replica's are sent.

    replica 0    flag, bytes of each buffer    ->    replica 1    takes those whose flag is set and whose shape fits

What is sent has the same size on all ranks and in all steps, also where a buffer was replaced by one of another shape.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_3d.distributed.agreement import described_alike
from lightning_3d.distributed.mesh import Mesh


class SharedBuffers:
    """Sends buffers of the first replica to the others.

    Args:
        module: Made parallel. What it registers later is not shared, nor what replicas have in different shapes, as a
            cache that a proof of its block has filled on one of them: it stays each replica's own.
        device: Where steps run.
    """

    def __init__(self, module: nn.Module, mesh: Mesh, device: torch.device) -> None:
        self._module, self._device = module, device
        self._group = mesh.group("state")
        self._is_first = dist.get_rank(self._group) == 0
        found = _local_buffers(module) if self._group.size() > 1 else {}
        kinds = {fqn: (buffer.shape, buffer.dtype) for fqn, buffer in found.items()}
        if found:
            shared = described_alike({fqn: str(kind) for fqn, kind in kinds.items()}, self._group)
            kinds = {fqn: kinds[fqn] for fqn in sorted(shared)}
        self._expected = kinds
        self._sizes = [found[fqn].nbytes for fqn in self._expected]
        self._are_due = True

    def before_step(self, *, are_due_after: bool) -> None:
        """Share them if a step may have changed any; every rank calls it.

        Args:
            are_due_after: Whether the step that follows may change some, and is not one of several of an accumulation.
        """
        if self._are_due and self._expected:
            with torch.no_grad():
                self._share()
        self._are_due = are_due_after

    def _share(self) -> None:
        present = _local_buffers(self._module)
        fitting = [self._fitting(present.get(fqn), fqn) for fqn in self._expected]
        flags = torch.tensor([buffer is not None for buffer in fitting], dtype=torch.uint8, device=self._device)
        parts = [self._bytes(buffer, size) for buffer, size in zip(fitting, self._sizes, strict=True)]
        sent = torch.cat([flags, *parts])
        dist.broadcast(sent, group=self._group, group_src=0)
        if self._is_first:
            return
        are_sent, *parts = sent.split([len(flags), *self._sizes])
        for buffer, is_sent, part in zip(fitting, are_sent, parts, strict=True):
            if buffer is not None:
                received = part.clone().view(buffer.dtype).view(buffer.shape).to(buffer.device)
                buffer.copy_(torch.where(is_sent.bool().to(buffer.device), received, buffer))

    def _fitting(self, buffer: Tensor | None, fqn: str) -> Tensor | None:
        return buffer if buffer is not None and (buffer.shape, buffer.dtype) == self._expected[fqn] else None

    def _bytes(self, buffer: Tensor | None, size: int) -> Tensor:
        if buffer is None:
            return torch.zeros(size, dtype=torch.uint8, device=self._device)
        return buffer.contiguous().view(-1).view(torch.uint8).to(self._device)


def _local_buffers(module: nn.Module) -> dict[str, Tensor]:
    """The buffers that this rank has, or its part of them, by name."""
    found = ((fqn, b.to_local() if isinstance(b, DTensor) else b) for fqn, b in module.named_buffers())
    return {fqn: buffer.detach() for fqn, buffer in found if not buffer.is_meta and buffer.numel()}
