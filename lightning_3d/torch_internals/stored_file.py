"""Files of torch.save, of which one tensor at a time is in memory."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any, BinaryIO

from torch import UntypedStorage
from torch.serialization import DEFAULT_PROTOCOL, _open_zipfile_writer, _save


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
