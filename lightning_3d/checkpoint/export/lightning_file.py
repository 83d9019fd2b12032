"""One plain file of a Lightning Trainer, of which one tensor at a time is in memory."""

from __future__ import annotations

import mmap
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, UntypedStorage

from lightning_3d.checkpoint.export.stored_tensor import StoredTensor, scratch
from lightning_3d.torch_internals.pytree import tree_leaves, tree_map_only
from lightning_3d.torch_internals.stored_file import save_from

_ALIGNMENT = 64
"""Bytes; that of torch's own storages."""


def write_file(checkpoint: Mapping[str, Any], path: Path) -> None:
    """Write a checkpoint that a plain Trainer loads.

    Args:
        checkpoint: It, with `StoredTensor` for tensors.
        path: A file that is not there.
    """
    stored = [leaf for leaf in dict.fromkeys(_tensors(checkpoint)) if leaf.num_bytes]
    room = _Room(sum(leaf.num_bytes + _ALIGNMENT for leaf in stored))
    places = {leaf: room.take(leaf) for leaf in stored}
    at = {place.data_ptr(): leaf for leaf, place in places.items()}
    one = scratch((max((leaf.num_bytes for leaf in stored), default=0),), torch.uint8)

    def content(storage: UntypedStorage) -> UntypedStorage:
        if (leaf := at.get(storage.data_ptr())) is None:
            return storage
        leaf.read_into(one)
        return one.untyped_storage()

    def standing_for(leaf: StoredTensor) -> Tensor:
        return places[leaf] if leaf in places else torch.empty(leaf.info.shape, dtype=leaf.info.dtype)

    save_from(tree_map_only(StoredTensor, standing_for, dict(checkpoint)), path, content)


def _tensors(checkpoint: Mapping[str, Any]) -> list[StoredTensor]:
    return [leaf for leaf in tree_leaves(dict(checkpoint)) if isinstance(leaf, StoredTensor)]


class _Room:
    """Addresses that nothing lies at, which cost no memory: tensors there have a shape, a dtype and an identity."""

    def __init__(self, size: int) -> None:
        self._mapping = mmap.mmap(-1, max(1, size), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, prot=mmap.PROT_READ)
        self._taken = 0

    def take(self, leaf: StoredTensor) -> Tensor:
        start, self._taken = self._taken, self._taken + -(-leaf.num_bytes // _ALIGNMENT) * _ALIGNMENT
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "The given buffer is not writable")
            count = leaf.num_bytes // leaf.info.dtype.itemsize
            flat = torch.frombuffer(self._mapping, dtype=leaf.info.dtype, count=count, offset=start)
        return flat.view(leaf.info.shape)
