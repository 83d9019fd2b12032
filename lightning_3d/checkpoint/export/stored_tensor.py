"""A tensor in a checkpoint, which is read when it is asked for."""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_3d.checkpoint.box import TensorInfo

PIECE = 2**22
"""Bytes of a tensor that are read at a time, but for tensors whose rows are larger."""


@dataclass(frozen=True, kw_only=True, eq=False)
class StoredTensor:
    """One tensor; tied names have the same object."""

    info: TensorInfo
    pieces: Callable[[], Iterator[Tensor]]
    """Its elements in order, in contiguous tensors of any shape."""

    @property
    def num_bytes(self) -> int:
        """Its size."""
        return torch.Size(self.info.shape).numel() * self.info.dtype.itemsize

    def read_into(self, room: Tensor) -> None:
        """Read all of it into the first bytes of a flat tensor of them."""
        start = 0
        for piece in self.pieces():
            room[start : start + piece.nbytes] = piece.view(-1).view(torch.uint8)
            start += piece.nbytes
        assert start == self.num_bytes


def scratch(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Room whose memory goes back to the system when it is freed, as that of malloc may not."""
    size = torch.Size(shape).numel() * dtype.itemsize
    if not size:
        return torch.empty(shape, dtype=dtype)
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(memory, dtype=dtype).view(shape)


def of_tensor(tensor: Tensor) -> StoredTensor:
    """One that lies in memory, or in a memory-mapped file."""

    def pieces() -> Iterator[Tensor]:
        rows = tensor.detach().view(-1) if tensor.is_contiguous() else tensor.detach()
        step = max(1, PIECE // max(1, rows[:1].numel() * rows.element_size()))
        for start in range(0, len(rows), step):
            yield rows[start : start + step].contiguous()

    return StoredTensor(info=TensorInfo(shape=tuple(tensor.shape), dtype=tensor.dtype), pieces=pieces)
