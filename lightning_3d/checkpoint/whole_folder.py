"""A checkpoint folder as one dictionary, for ``MyModule.load_from_checkpoint(folder)`` in a process of its own."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import torch

from lightning_3d.checkpoint.damage import damage, raise_of_damage
from lightning_3d.checkpoint.folder import MODEL, Folder, is_sharded_checkpoint, read_rest


def read_folder(path: object, map_location: Any, weights_only: bool | None) -> dict[str, Any] | None:
    """The contents of a file, but for the states of optimizers; None where there is no checkpoint folder.

    Args:
        map_location: As in ``torch.load``.
        weights_only: The same.
    """
    if not isinstance(path, str | Path) or not is_sharded_checkpoint(Path(path)):
        return None
    raise_of_damage(Path(path), damage(Path(path)))
    folder = Folder.open(Path(path), weights_only=weights_only)
    rest = read_rest(folder.location, map_location=map_location, weights_only=weights_only)
    paths = [entry for entry in folder.entries if entry[0] == MODEL]
    state = io.BytesIO()
    torch.save({str(entry[1]): value for entry, value in zip(paths, folder.read_alone(paths), strict=True)}, state)
    state.seek(0)
    return {**rest, MODEL: torch.load(state, map_location=map_location, weights_only=False)}
