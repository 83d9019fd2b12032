"""Addresses that nothing lies at, which cost no memory: tensors there have a shape, a dtype and an identity."""

from __future__ import annotations

import mmap
import warnings
from collections.abc import Iterable

import torch
from torch import Tensor

from lightning_3d.checkpoint.box import TensorInfo

_ALIGNMENT = 64
"""Bytes; that of torch's own storages."""


class Room:
    """Addresses for some tensors, which `take` gives them.

    Args:
        infos: Their shapes and dtypes.
    """

    def __init__(self, infos: Iterable[TensorInfo]) -> None:
        size = sum(map(_aligned, infos))
        self._mapping = mmap.mmap(-1, max(1, size), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, prot=mmap.PROT_READ)
        self._taken = 0

    def take(self, info: TensorInfo) -> Tensor:
        """A tensor, which may not be written to."""
        count = torch.Size(info.shape).numel()
        if count == 0:
            return torch.empty(info.shape, dtype=info.dtype)
        start, self._taken = self._taken, self._taken + _aligned(info)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "The given buffer is not writable")
            flat = torch.frombuffer(self._mapping, dtype=info.dtype, count=count, offset=start)
        return flat.view(info.shape)


def _aligned(info: TensorInfo) -> int:
    num_bytes = torch.Size(info.shape).numel() * info.dtype.itemsize
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
