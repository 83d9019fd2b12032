"""Tensors in files below a directory.

A file is reserved whole when it is made, so that a full disk shows there and not when a page is written, and mapped
into memory. The kernel reads pages when they are touched, or before, when told to; it writes changed pages when it
likes and drops them when memory is short. What a process has touched counts as its own until it lets go.

The files have no names: they are gone with the process, however that ends, and runs can share a directory.
"""

from __future__ import annotations

import math
import mmap
import os
import shutil
import tempfile
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

import torch
from torch import Tensor
from typing_extensions import override

from lightning_3d.errors import OffloadError
from lightning_3d.zero.offload.store import Store

_ALIGNMENT = 64  # bytes, as torch aligns tensors
_POPULATE_WRITE = 23  # of madvise(2), which Python's mmap does not name
_SMALLEST, _LARGEST = 2**20, 2**30  # bytes of a file that nobody asked for


class Files(Store):
    """Memory-mapped files; tensors smaller than a page stay in host memory.

    Args:
        directory: Made if it does not exist.

    Raises:
        OffloadError: it can't be made or written.
    """

    can_fail = True

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._files: list[_MappedFile] = []
        try:
            directory.mkdir(parents=True, exist_ok=True)
            _MappedFile(directory, mmap.PAGESIZE)
        except OSError as error:
            raise self._failure(error, mmap.PAGESIZE) from error

    @override
    def holds(self, tensor: Tensor) -> bool:
        return tensor.device.type == "cpu" and (tensor.nbytes < mmap.PAGESIZE or self._file_of(tensor) is not None)

    @override
    def zeros(self, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        num_bytes = math.prod(shape) * dtype.itemsize
        if num_bytes < mmap.PAGESIZE:
            return torch.zeros(shape, dtype=dtype)
        file = next((file for file in self._files if file.room >= num_bytes), None)
        if file is None:
            in_use = sum(file.num_bytes for file in self._files)
            file = self._new_file(max(num_bytes, min(max(in_use, _SMALLEST), _LARGEST)))
        return file.take(num_bytes).view(dtype).view(shape)

    @override
    def reserve(self, num_bytes: int) -> None:
        if num_bytes > 0:
            self._new_file(num_bytes)

    def _new_file(self, num_bytes: int) -> _MappedFile:
        try:
            self._files.append(_MappedFile(self._directory, num_bytes))
        except OSError as error:
            raise self._failure(error, num_bytes) from error
        return self._files[-1]

    @override
    def size_of(self, num_bytes: int) -> int:
        return _aligned(num_bytes) if num_bytes >= mmap.PAGESIZE else 0

    @override
    def will_need(self, tensors: Iterable[Tensor]) -> None:
        self._advise(tensors, mmap.MADV_WILLNEED)

    @override
    def need(self, tensors: Iterable[Tensor]) -> None:
        with suppress(OSError):  # before Linux 5.14 pages come one by one, when they are touched
            self._advise(tensors, _POPULATE_WRITE)

    @override
    def let_go(self, tensors: Iterable[Tensor]) -> None:
        self._advise(tensors, mmap.MADV_DONTNEED)

    def _advise(self, tensors: Iterable[Tensor], advice: int) -> None:
        for tensor in tensors:
            if (file := self._file_of(tensor)) is not None:
                file.advise(tensor, advice)

    def _file_of(self, tensor: Tensor) -> _MappedFile | None:
        return next((file for file in self._files if file.holds(tensor)), None)

    def _failure(self, error: OSError, num_bytes: int) -> OffloadError:
        existing = next(path for path in (self._directory, *self._directory.absolute().parents) if path.exists())
        free = shutil.disk_usage(existing).free
        return OffloadError(
            f"can't offload to {self._directory}: {error.strerror or error}. A file of {num_bytes:,} bytes was to be"
            f" made there, and {free:,} bytes are free. Make room, or give zero.offload_optimizer and"
            " zero.offload_params a directory that each rank can write to"
        )


class _MappedFile:
    """A file without a name, of a fixed size, from which tensors are cut one after the other."""

    def __init__(self, directory: Path, num_bytes: int) -> None:
        with tempfile.TemporaryFile(dir=directory) as file:
            os.posix_fallocate(file.fileno(), 0, num_bytes)
            self._map = mmap.mmap(file.fileno(), num_bytes)
        self._memory = torch.frombuffer(self._map, dtype=torch.uint8)
        self._start, self._used = self._memory.data_ptr(), 0
        self.num_bytes = num_bytes

    @property
    def room(self) -> int:
        """Bytes that are left."""
        return self.num_bytes - self._used

    def take(self, num_bytes: int) -> Tensor:
        taken = self._memory[self._used : self._used + num_bytes]
        self._used = min(self.num_bytes, self._used + _aligned(num_bytes))
        return taken

    def holds(self, tensor: Tensor) -> bool:
        return self._start <= tensor.data_ptr() < self._start + self.num_bytes

    def advise(self, tensor: Tensor, advice: int) -> None:
        """Advise the kernel of all pages that a tensor touches; where others share them, no data can be lost."""
        begin = tensor.data_ptr() - self._start
        first = begin // mmap.PAGESIZE * mmap.PAGESIZE
        if tensor.nbytes:
            self._map.madvise(advice, first, begin + tensor.nbytes - first)


def _aligned(num_bytes: int) -> int:
    """Bytes that a tensor of so many takes in a file."""
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
