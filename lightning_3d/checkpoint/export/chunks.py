"""Tensors in the files of torch.distributed.checkpoint, read row by row from the chunks that the ranks wrote.

torch's own reader makes room for a whole tensor, and loads whole chunks beside it. Here the rows of a piece are read
from where they lie in the file.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata

from lightning_3d.checkpoint.box import TensorInfo
from lightning_3d.checkpoint.export.stored_tensor import PIECE, StoredTensor, scratch
from lightning_3d.checkpoint.file_part import file_part, read_into
from lightning_3d.errors import CheckpointError
from lightning_3d.torch_internals.stored_file import read_header


def stored_tensors(folder: Path, index: Metadata) -> dict[str, StoredTensor]:
    """All tensors in a folder, by their names in the files."""
    places: dict[str, dict[tuple[int, ...], Any]] = {}
    for at, place in index.storage_data.items():
        assert isinstance(at, MetadataIndex)
        places.setdefault(at.fqn, {})[tuple(at.offset or ())] = place
    return {
        key: _stored_tensor(folder, key, stored, places.get(key, {}))
        for key, stored in index.state_dict_metadata.items()
        if isinstance(stored, TensorStorageMetadata)
    }


def _stored_tensor(
    folder: Path, key: str, stored: TensorStorageMetadata, places: Mapping[tuple[int, ...], Any]
) -> StoredTensor:
    info = TensorInfo(shape=tuple(stored.size), dtype=stored.properties.dtype)

    def pieces() -> Iterator[Tensor]:
        chunks = []
        for chunk in stored.chunks:
            if (place := places.get(tuple(chunk.offsets))) is None or place.transform_descriptors:
                raise CheckpointError(f"{folder} has no plain data of {key} at {tuple(chunk.offsets)}: it is damaged")
            chunks.append(
                _Chunk(folder / place.relative_path, place, info.dtype, tuple(chunk.sizes), tuple(chunk.offsets))
            )
        if sum(math.prod(chunk.sizes) for chunk in chunks) != math.prod(info.shape):
            raise CheckpointError(f"the chunks of {key} in {folder} do not make up its shape {info.shape}")
        return _assembled(info, chunks)

    return StoredTensor(info=info, pieces=pieces)


def _assembled(info: TensorInfo, chunks: Sequence[_Chunk]) -> Iterator[Tensor]:
    """The rows of a tensor, some at a time."""
    outer = next((dim for dim, size in enumerate(info.shape) if size != 1), len(info.shape))
    shape = info.shape[outer:] or (1,)  # a single row would be read at once
    rows = max(1, PIECE // max(1, math.prod(shape[1:]) * info.dtype.itemsize))
    for start in range(0, shape[0] if math.prod(shape) else 0, rows):
        stop = min(start + rows, shape[0])
        whole: Tensor | None = None
        for chunk in chunks:
            offsets, sizes = chunk.offsets[outer:] or (0,), chunk.sizes[outer:] or (1,)
            first, last = max(start, offsets[0]), min(stop, offsets[0] + sizes[0])
            if first >= last or not math.prod(sizes):
                continue
            part = chunk.rows(sizes, first - offsets[0], last - offsets[0])
            if part.shape == (stop - start, *shape[1:]):
                whole = part
                break
            whole = scratch((stop - start, *shape[1:]), info.dtype) if whole is None else whole
            inner = zip(offsets[1:], sizes[1:], strict=True)
            whole[slice(first - start, last - start), *(slice(at, at + size) for at, size in inner)] = part
        assert whole is not None
        yield whole


class _Chunk:
    """A box of a tensor in a file."""

    def __init__(
        self, path: Path, place: Any, dtype: torch.dtype, sizes: tuple[int, ...], offsets: tuple[int, ...]
    ) -> None:
        self.sizes, self.offsets = sizes, offsets
        self._path, self._dtype, self._place = path, dtype, place
        try:
            with path.open("rb") as file:
                header, start = read_header(file_part(file, place.offset, place.length))
        except Exception as error:
            raise CheckpointError(f"{path} can't be read at byte {place.offset}: it is damaged ({error})") from error
        if (tuple(header.shape), header.dtype) != (sizes, dtype):
            raise CheckpointError(f"{path} holds at byte {place.offset} another tensor than its index says")
        self._start = place.offset + start + header.storage_offset() * dtype.itemsize
        self._whole: Tensor | None = None
        if not header.is_contiguous():
            with path.open("rb") as file:
                self._whole = torch.load(file_part(file, place.offset, place.length), weights_only=True).contiguous()

    def rows(self, sizes: tuple[int, ...], first: int, last: int) -> Tensor:
        """Some rows of it, where it is seen with these sizes."""
        if self._whole is not None:
            return self._whole.view(sizes)[first:last]
        rows = scratch((last - first, *sizes[1:]), self._dtype)
        row = math.prod(sizes[1:]) * self._dtype.itemsize
        with self._path.open("rb", buffering=0) as file:
            num_missing = read_into(rows, file, self._start + first * row)
        if num_missing:
            raise CheckpointError(f"{self._path} ends within a tensor: it is damaged")
        return rows
