"""Files of torch.save, of which one tensor at a time is in memory, and the classes in the index of a folder of DCP."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any, BinaryIO

from torch import UntypedStorage
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    _MEM_FORMAT_ENCODING,
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.serialization import DEFAULT_PROTOCOL, _get_layout, _open_zipfile_writer, _save

CLASSES: tuple[type, ...] = (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
    _MEM_FORMAT_ENCODING,
    _StorageInfo,
)
"""Classes of the objects in an index."""

layout_named = _get_layout
"""Name of a layout -> the layout, as pickles of layouts call it."""


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

    def write_record(self, name: str, data: object, size: int) -> None:
        self._writer.write_record(name, self._content(data) if isinstance(data, UntypedStorage) else data, size)
