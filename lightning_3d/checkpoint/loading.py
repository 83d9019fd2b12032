"""Checkpoints of any layout, folders and files, as a Trainer, ``load_from_checkpoint`` and export read them.

A Trainer's ranks read them together, each its own part:

    state_dict, optimizer_states     `SavedState`: read when a hook asks for it, or right into the model and optimizers
    tensors elsewhere                this rank's part if the model has one of that name, as in an average; else all
"""

from __future__ import annotations

import io
from collections.abc import Mapping
from os import PathLike
from pathlib import Path
from typing import Any
from zipfile import is_zipfile

import torch
from torch import Tensor, nn

from lightning_3d.checkpoint.atomic import MANIFEST, META, NOT_SHARED, published_path
from lightning_3d.checkpoint.box import Share
from lightning_3d.checkpoint.checksums import check_content, read_manifest
from lightning_3d.checkpoint.collective_errors import collective_errors
from lightning_3d.checkpoint.content import MODEL, OPTIMIZERS, Content, TreePath, in_place, joined, sections, states_of
from lightning_3d.checkpoint.folder import TIED, Folder, is_of_optimizer, is_sharded_checkpoint
from lightning_3d.checkpoint.lazy import LazyTensor, SavedState, as_lazy, save_lazily, take
from lightning_3d.checkpoint.own_state import state_of
from lightning_3d.checkpoint.reading import unpickling
from lightning_3d.distributed.agreement import on_one_rank
from lightning_3d.errors import CheckpointError, CheckpointNotFoundError
from lightning_3d.sharding.placement import InterleavedShard, interleaved_parameters

# --------------------------------------------------------------------------------------------------------- by a Trainer


def read_checkpoint(path: Path, module: nn.Module, *, weights_only: bool | None) -> dict[str, object]:
    """Read a checkpoint that any layout wrote; a collective of all ranks.

    Tensors of a file stay in it (memory-mapped) until they are used.

    Args:
        path: The same on all ranks, readable on all of them.
        module: The whole module; blocks of other stages are on the meta device.
        weights_only: As in ``torch.load``.

    Raises:
        CheckpointError: It can't be read, or ranks see different ones; on all ranks.

    """
    there = on_one_rank(lambda: _seen_at(path))
    with collective_errors(f"read the checkpoint {path}"):
        if (seen := _seen_at(path)) != there:
            raise CheckpointError(f"Rank 0 sees {there} there, and this rank {seen}: {NOT_SHARED}")
    check_content(path, is_shared=True)
    checkpoint: dict[str, object] = {}
    with collective_errors(f"read the checkpoint {path}"):
        if path.is_dir():
            checkpoint = _own_parts(Folder.open(path, weights_only=weights_only), module)
        else:
            checkpoint = torch.load(path, map_location="cpu", mmap=True, weights_only=weights_only)
    return checkpoint


def _seen_at(path: Path) -> str:
    return "a folder" if path.is_dir() else "a file" if path.exists() else "nothing"


def _own_parts(folder: Folder, module: nn.Module) -> dict[str, object]:
    content, model, parts = folder.content(), state_of(module), interleaved_parameters(module)
    values = content.values
    further = {path: value for path, value in values.items() if path[0] != MODEL and not is_of_optimizer(path)}
    checkpoint = in_place(
        {path: _own_part(path, value, model, parts) for path, value in further.items()}, content.metadata
    )
    checkpoint[MODEL] = SavedState({str(path[1]): value for path, value in values.items() if path[0] == MODEL})
    if (num := _num_optimizers(folder, content)) is not None:
        checkpoint[OPTIMIZERS] = [
            {"state": SavedState(states_of(values, section)), "param_groups": values[section, "param_groups"]}
            for section in sections(num)
        ]
    return checkpoint


def _num_optimizers(folder: Folder, content: Content) -> int | None:
    """Number of optimizers whose states it has; None of a checkpoint that was saved without any."""
    is_without = not folder.num_optimizers and "lr_schedulers" not in content.metadata
    return None if is_without else folder.num_optimizers


def _own_part(
    path: TreePath, value: object, model: Mapping[str, object], parts: Mapping[str, InterleavedShard]
) -> object:
    if not isinstance(value, LazyTensor):
        return value
    steps = str(path[-1]).split(".")
    for fqn in (".".join(steps[start:]) for start in range(len(steps))):
        like = model.get(fqn)
        if isinstance(like, Tensor) and tuple(like.shape) == value.info.shape:
            if like.is_meta:
                return torch.empty(like.shape, dtype=value.info.dtype, device="meta")
            own = torch.empty_like(like, dtype=value.info.dtype, requires_grad=False)
            take(Share(own, parts.get(fqn)), value)
            return own
    return value.make()


# ------------------------------------------------------------------------------------------------------- by one process


def located(path: Path) -> Path:
    """Where the checkpoint of a path is.

    Raises:
        CheckpointNotFoundError: There is nothing.
        CheckpointError: It is no checkpoint.

    """
    path = published_path(path)
    if not path.exists():
        raise CheckpointNotFoundError(f"there is no checkpoint {path}")
    if path.is_dir() and not is_sharded_checkpoint(path):
        raise CheckpointError(f"{path} is no checkpoint: a folder of one has the file {META}")
    if path.is_file() and not is_zipfile(path):
        raise CheckpointError(f"{path} is no checkpoint: torch.save writes zip files, and it is none")
    return path


def checked(path: Path) -> Path:
    """Where the checkpoint of a path is, whose files or records have been compared with their checksums.

    Raises:
        CheckpointNotFoundError: There is nothing.
        CheckpointError: It is no checkpoint, or damaged.

    """
    path = located(path)
    check_content(path)
    return path


def verify_checkpoint(location: str | PathLike[str]) -> str:
    """Check all files of a checkpoint, and describe what was compared.

    Args:
        location: A checkpoint folder or a `.ckpt` file.

    Raises:
        CheckpointNotFoundError: There is none.
        CheckpointError: Files are damaged, or there are no checksums to compare them with.

    """
    path = checked(Path(location))
    if path.is_file():
        return f"{location} is whole: one file, {path.stat().st_size} bytes"
    if (files := read_manifest(path)) is None:
        raise CheckpointError(f"{path} has no checksums to compare it with: folders of Lightning have no {MANIFEST}")
    return f"{location} is whole: {len(files)} files, {sum(file.size for file in files.values())} bytes"


def lazy_checkpoint(path: Path, *, weights_only: bool | None, leave_out: str = "") -> dict[str, Any]:
    """A checkpoint as a plain Trainer has it in a file; those of its tensors that take memory are `LazyTensor`.

    Args:
        path: As `checked` gives it.
        weights_only: As in ``torch.load``.
        leave_out: Of a folder: "rest" for the state of the model alone, "optimizers" for all but their states.

    Raises:
        CheckpointError: It holds what may not be unpickled, or can't be read.

    """
    if path.is_file():
        with unpickling(path):
            loaded = torch.load(path, map_location="cpu", mmap=True, weights_only=weights_only)
        if not isinstance(loaded, dict) or not isinstance(loaded.get(MODEL), Mapping):
            raise CheckpointError(f'{path} is no checkpoint of a Trainer: it has no "{MODEL}"')
        return as_lazy(loaded)  # type: ignore[no-any-return]
    with unpickling(path):
        folder = Folder.open(path, weights_only=weights_only)
    if leave_out == "rest":
        content = Content(values=folder.values(lambda path: path[0] in (MODEL, TIED)), metadata={})
    else:
        content = folder.content(lambda path: not (leave_out and is_of_optimizer(path)))
    checkpoint = joined(content.values, content.metadata, None if leave_out else _num_optimizers(folder, content))
    state = checkpoint[MODEL]
    for other, first in [(path[1], value) for path, value in content.values.items() if path[0] == TIED]:
        if _are_equal(state.get(first), state.get(other)):
            state[other] = state[first]
    return checkpoint


def _are_equal(first: object, second: object) -> bool:
    if not isinstance(first, LazyTensor) or not isinstance(second, LazyTensor):
        return False
    return first.info == second.info and torch.equal(first.make(), second.make())


def read_folder(path: object, map_location: Any, weights_only: bool | None) -> dict[str, object] | None:
    """A checkpoint folder as one dictionary, for ``MyModule.load_from_checkpoint``; None where there is none, and of a
    file, whose records are checked.

    Args:
        map_location: As in ``torch.load``.
        weights_only: The same.

    Returns:
        The contents of a file, but for the states of optimizers.
    """
    if not isinstance(path, str | Path) or not is_sharded_checkpoint(Path(path)):
        if isinstance(path, str | Path) and Path(path).is_file():
            check_content(Path(path))
        return None
    content = io.BytesIO()
    save_lazily(lazy_checkpoint(checked(Path(path)), weights_only=weights_only, leave_out="optimizers"), content)
    content.seek(0)
    return torch.load(content, map_location=map_location, weights_only=False)  # type: ignore[no-any-return]
