"""Python objects that ranks exchange: their structure by way of the hosts, and their tensors from device to device.

Pickled as it is, a tensor would wait for its device, and be opened by every rank on the device of the one that sent it,
each with a context of its own there.
"""

from __future__ import annotations

import io
import pickle
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from typing_extensions import override

from lightning_3d.torch_internals.lightning_helpers import default_backend


def default_backends(device: torch.device) -> str:
    """Backends of collectives: torch's for the device, and gloo for objects, so that no host waits for its device."""
    backend = default_backend(device)
    return backend if device.type == "cpu" else f"cpu:gloo,{device.type}:{backend}"


def broadcast_object(value: object, device: torch.device, *, src: int, group: dist.ProcessGroup | None = None) -> Any:
    """The object of one rank of a group; every rank of it calls this.

    Args:
        value: Is sent by the source, and ignored elsewhere. Must be picklable.
        device: Where tensors arrive that are not in host memory at the source.
        src: Global rank.
    """
    if dist.get_rank() == src:
        packed = _Packed(value)
        dist.broadcast_object_list([packed.structure, packed.metas], src=src, group=group)
        for tensor in packed.tensors:
            dist.broadcast(tensor, src=src, group=group)
        return value
    received: list[Any] = [None, None]
    dist.broadcast_object_list(received, src=src, group=group)
    structure, metas = received
    tensors = [torch.empty(shape, dtype=dtype, device=device) for shape, dtype in metas]
    for tensor in tensors:
        dist.broadcast(tensor, src=src, group=group)
    return _Unpickler(structure, tensors).load()


def all_gather_objects(value: object, device: torch.device, *, group: dist.ProcessGroup | None = None) -> list[Any]:
    """The objects of all ranks of a group, by rank in it; every rank of it calls this.

    Args:
        value: Must be picklable.
        device: Where tensors arrive that are not in host memory at their rank.
    """
    ranks = dist.get_process_group_ranks(group)
    return [broadcast_object(value, device, src=rank, group=group) for rank in ranks]


class _Packed(pickle.Pickler):
    """An object as bytes, and the tensors in it that lie on devices, in their order."""

    def __init__(self, value: object) -> None:
        buffer = io.BytesIO()
        super().__init__(buffer)
        self.tensors: list[Tensor] = []
        self._indices: dict[int, int] = {}
        self.dump(value)
        self.structure = buffer.getvalue()
        self.metas = [(tensor.shape, tensor.dtype) for tensor in self.tensors]

    @override
    def persistent_id(self, obj: object) -> int | None:
        if type(obj) is not Tensor or obj.device.type in ("cpu", "meta"):
            return None
        if id(obj) not in self._indices:
            self._indices[id(obj)] = len(self.tensors)
            self.tensors.append(obj.detach().contiguous())
        return self._indices[id(obj)]


class _Unpickler(pickle.Unpickler):
    def __init__(self, structure: bytes, tensors: list[Tensor]) -> None:
        super().__init__(io.BytesIO(structure))
        self._tensors = tensors

    @override
    def persistent_load(self, pid: int) -> Tensor:
        return self._tensors[pid]
