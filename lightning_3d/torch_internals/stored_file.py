"""Files of torch.save, of which one tensor at a time is in memory."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any, BinaryIO, cast

import torch
from torch import Tensor, UntypedStorage
from torch.distributed.checkpoint.utils import _create_file_view
from torch.serialization import DEFAULT_PROTOCOL, _open_zipfile_writer, _save

from lightning_3d.torch_internals.fake_tensors import FakeTensorMode

file_part = cast(Callable[[BinaryIO, int, int], BinaryIO], _create_file_view)
"""File, first byte, number of bytes -> these bytes as a file, which is read alone: the file's position changes."""


def read_header(file: BinaryIO) -> tuple[Tensor, int]:
    """A stored tensor without its data, and at which byte of the file its storage begins."""
    with FakeTensorMode():
        tensor = torch.load(file, weights_only=True)
    return tensor, cast(int, tensor.untyped_storage()._checkpoint_offset)


def save_from(value: object, file: BinaryIO, content: Callable[[UntypedStorage], UntypedStorage]) -> None:
    """Write a file as torch.save does.

    Args:
        content: Storage in ``value`` -> one whose first bytes are written in its place, before the next is asked for.
    """
    with _open_zipfile_writer(file) as writer:
        _save(value, _Records(writer, content), pickle, DEFAULT_PROTOCOL, False)


class _Records:
    """The part of torch's writer of records that it uses here."""

    def __init__(self, writer: Any, content: Callable[[UntypedStorage], UntypedStorage]) -> None:
        self._writer, self._content = writer, content

    def write_record(self, name: str, data: Any, size: int) -> None:
        self._writer.write_record(name, self._content(data) if isinstance(data, UntypedStorage) else data, size)
