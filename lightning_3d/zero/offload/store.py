"""Memory for what does not lie on the device: that of the host, or files below a directory that are mapped into it.

A file is reserved whole when it is made, so that a full disk shows there and not when a page is written. The kernel
reads pages when they are touched, or before, when told to; it writes changed pages when it likes and drops them when
memory is short. What a process has touched counts as its own until it lets go.

Files have no names: they are gone with the process, however that ends, and runs can share a directory.
"""

from __future__ import annotations

import ctypes
import math
import os
import shutil
import tempfile
from collections.abc import Iterable
from enum import IntEnum
from pathlib import Path
from weakref import WeakSet

import torch
from torch import Tensor, UntypedStorage

from lightning_3d.errors import OffloadError

_PAGE = os.sysconf("SC_PAGE_SIZE")


class Advice(IntEnum):
    """How tensors in files are used next, in the numbers of Linux's madvise(2)."""

    SOON = 3  # MADV_WILLNEED
    IN_LARGE_PAGES = 14  # MADV_HUGEPAGE, for pages that are not there yet; else a step takes a fault for each 4 KiB
    WRITTEN_NOW = 23  # MADV_POPULATE_WRITE; before Linux 5.14 pages come one by one, when they are touched
    NOT_FOR_A_WHILE = 4  # MADV_DONTNEED


class Store:
    """Holds tensors of the CPU device. Memory of the host is not pinned: only parameters and gradients travel.

    Args:
        directory: Has the files, of tensors that are no smaller than a page, if there are any. Made if it does not
            exist.

    Raises:
        OffloadError: it can't be made or written.
    """

    def __init__(self, directory: Path | None = None) -> None:
        self._directory = directory
        self._files: WeakSet[UntypedStorage] = WeakSet()
        if directory is not None:
            self._new_file(_PAGE)

    @classmethod
    def at(cls, place: str) -> Store:
        """The one of ``zero.offload_optimizer`` or ``zero.offload_params``; ``"none"`` is the memory of the host, too.

        Raises:
            OffloadError: it is a directory that can't be made or written, on this rank.
        """
        return cls(None if place in ("none", "cpu") else Path(place).expanduser())

    def holds(self, tensor: Tensor) -> bool:
        """Whether a tensor, or what it is a view of, lies here."""
        is_small = self._directory is None or tensor.nbytes < _PAGE
        return tensor.device.type == "cpu" and (is_small or self._is_in_file(tensor))

    def zeros(self, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        """A new tensor.

        Raises:
            OffloadError: there is no room.
        """
        num_bytes = math.prod(shape) * dtype.itemsize
        if self._directory is None or num_bytes < _PAGE:
            return torch.zeros(shape, dtype=dtype)
        memory = self._new_file(num_bytes)
        self._files.add(memory.untyped_storage())
        for advice in (Advice.IN_LARGE_PAGES, Advice.WRITTEN_NOW, Advice.NOT_FOR_A_WHILE):
            self.advise([memory], advice)
        return memory.view(dtype).view(shape)

    def _new_file(self, num_bytes: int) -> Tensor:
        assert self._directory is not None
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=self._directory) as file:
                os.posix_fallocate(file.fileno(), 0, num_bytes)
                return torch.from_file(f"/proc/self/fd/{file.fileno()}", True, num_bytes, dtype=torch.uint8)
        except OSError as error:
            folders = (self._directory, *self._directory.absolute().parents)
            free = shutil.disk_usage(next(path for path in folders if path.exists())).free
            raise OffloadError(
                f"can't offload to {self._directory}: {error.strerror or error}. A file of {num_bytes:,} bytes was to"
                f" be made there, and {free:,} bytes are free. Make room, or give zero.offload_optimizer and"
                " zero.offload_params a directory that each rank can write to"
            ) from error

    def advise(self, tensors: Iterable[Tensor], advice: Advice) -> None:
        """Tell how tensors are used next, by all pages that they touch; those that are in no file are ignored."""
        if not self._files:
            return
        madvise = ctypes.CDLL(None).madvise
        for tensor in tensors:
            if tensor.nbytes and self._is_in_file(tensor):
                first = tensor.data_ptr() // _PAGE * _PAGE
                length = tensor.data_ptr() + tensor.nbytes - first
                madvise(ctypes.c_void_p(first), ctypes.c_size_t(length), advice.value)

    def _is_in_file(self, tensor: Tensor) -> bool:
        return tensor.untyped_storage() in self._files
