"""A part of a file, read as a file or into a tensor."""

from __future__ import annotations

import io
from typing import Any, BinaryIO, cast

import torch
from torch import Tensor
from typing_extensions import override


def file_part(file: BinaryIO, start: int, length: int) -> BinaryIO:
    """Some bytes of a file, to be read.

    Args:
        file: Its position changes.
        start: The first of them.
        length: Their number.
    """
    return cast(BinaryIO, _Part(file, start, length))


def read_into(tensor: Tensor, file: BinaryIO, start: int) -> int:
    """Read the values of a tensor, as they lie in memory.

    Args:
        tensor: It is contiguous and on the CPU.
        file: Opened without a buffer; its position changes.
        start: The first byte of them.

    Returns:
        The number of bytes that the file lacks.
    """
    file.seek(start)
    room = memoryview(tensor.view(-1).view(torch.uint8).numpy().data)
    while room and (num_read := file.readinto(room)):  # type: ignore[attr-defined]
        room = room[num_read:]
    return len(room)


class _Part(io.RawIOBase):
    """Some bytes of a file as a file."""

    def __init__(self, file: BinaryIO, start: int, length: int) -> None:
        self._file, self._start, self._length, self._at = file, start, length, 0

    @override
    def readable(self) -> bool:
        return True

    @override
    def seekable(self) -> bool:
        return True

    @override
    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._length}[whence]
        return self._at

    @override
    def tell(self) -> int:
        return self._at

    @override
    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer)[: max(0, self._length - self._at)]
        self._file.seek(self._start + self._at)
        num_read: int = self._file.readinto(view)  # type: ignore[attr-defined]
        self._at += num_read
        return num_read
