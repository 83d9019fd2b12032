"""Python objects that ranks exchange, in which tensors arrive on the device of the rank that gets them.

Pickled as it is, a tensor of one GPU would be opened on that GPU by every rank, each with a context of its own there.
"""

from __future__ import annotations

import io
from typing import Any

import torch
import torch.distributed as dist


def broadcast_object(value: Any, device: torch.device, *, src: int, group: dist.ProcessGroup | None = None) -> Any:
    """The object of one rank of a group; every rank of it calls this.

    Args:
        value: Is sent by the source, and ignored elsewhere. Must be picklable.
        device: Where tensors go that were not on the CPU of the source.
        src: Global rank.
    """
    is_source = dist.get_rank() == src
    sent = [_packed(value) if is_source else b""]
    dist.broadcast_object_list(sent, src=src, group=group, device=device)
    return value if is_source else _unpacked(sent[0], device)


def all_gather_objects(value: Any, device: torch.device, *, group: dist.ProcessGroup | None = None) -> list[Any]:
    """The objects of all ranks of a group, by rank in it; every rank of it calls this.

    Args:
        value: Must be picklable.
        device: Where tensors go that were not on the CPU of their rank.
    """
    packed: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(packed, _packed(value), group=group)
    return [_unpacked(one, device) for one in packed]


def _packed(value: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def _unpacked(packed: bytes, device: torch.device) -> Any:
    def to(storage: Any, location: str) -> Any:  # a storage that was read into the memory of the host
        return storage if location == "cpu" else storage.to(device=device)

    return torch.load(io.BytesIO(packed), map_location=to, weights_only=False)  # of ranks of this very run
