"""One plain file of a Lightning Trainer, of which one tensor at a time is in memory."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, UntypedStorage

from lightning_3d.checkpoint.export.stored_tensor import StoredTensor, scratch
from lightning_3d.checkpoint.room import Room
from lightning_3d.torch_internals.pytree import tree_leaves, tree_map_only
from lightning_3d.torch_internals.stored_file import save_from


def write_file(checkpoint: Mapping[str, Any], path: Path) -> None:
    """Write a checkpoint that a plain Trainer loads.

    Args:
        checkpoint: It, with `StoredTensor` for tensors.
        path: A file that is not there.
    """
    stored = [leaf for leaf in dict.fromkeys(_tensors(checkpoint)) if leaf.num_bytes]
    room = Room(leaf.info for leaf in stored)
    places = {leaf: room.take(leaf.info) for leaf in stored}
    at = {place.data_ptr(): leaf for leaf, place in places.items()}
    one = scratch((max((leaf.num_bytes for leaf in stored), default=0),), torch.uint8)

    def content(storage: UntypedStorage) -> UntypedStorage:
        if (leaf := at.get(storage.data_ptr())) is None:
            return storage
        leaf.read_into(one)
        return one.untyped_storage()

    def standing_for(leaf: StoredTensor) -> Tensor:
        return places[leaf] if leaf in places else torch.empty(leaf.info.shape, dtype=leaf.info.dtype)

    with path.open("wb") as file:
        save_from(tree_map_only(StoredTensor, standing_for, dict(checkpoint)), file, content)


def _tensors(checkpoint: Mapping[str, Any]) -> list[StoredTensor]:
    return [leaf for leaf in tree_leaves(dict(checkpoint)) if isinstance(leaf, StoredTensor)]
