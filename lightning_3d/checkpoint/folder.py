"""Checkpoints as folders: every rank writes what it holds, and reads what it needs of what others wrote.

The layout is that of Lightning's ModelParallelStrategy: files of torch.distributed.checkpoint (DCP) with the sections
`state_dict` and `optimizer_{i}`, everything by FQN, and `meta.pt` with the rest of the Trainer's checkpoint.

    state_dict.{fqn}                                   parameters, buffers, extra state
    optimizer_0.state.{fqn}.{name}                     optimizer state, placed as its parameter, or a scalar
    optimizer_0.param_groups.{group}.{hyperparameter}  "params" lists FQNs; written by rank 0

Lightning's FSDPStrategy calls the first section `model`.

Reading makes room for some of its values and lets DCP fill it. A path is the way through the nested dictionaries that
were saved: ("state_dict", fqn), ("optimizer_0", "state", fqn, name), ("optimizer_0", "param_groups", 0, "lr").
"""

from __future__ import annotations

import io
import warnings
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.device_mesh import DeviceMesh

from lightning_3d.checkpoint.box import TensorInfo
from lightning_3d.checkpoint.damage import REPAIR, check_files
from lightning_3d.checkpoint.fail_alike import failing_alike
from lightning_3d.checkpoint.manifest import MANIFEST, META, is_own
from lightning_3d.checkpoint.match import check_model
from lightning_3d.checkpoint.own_state import (
    filled_from,
    model_shares,
    restore_model,
    state_of,
)
from lightning_3d.checkpoint.reading import FolderPlanner, FolderReader
from lightning_3d.checkpoint.share import Share, optimizer_shares, tensor_of
from lightning_3d.checkpoint.writing import HAS_MANIFEST, FolderContent
from lightning_3d.errors import CheckpointError
from lightning_3d.tensor.placement import Parts

TreePath = tuple[str | int, ...]

MODEL = "state_dict"
"""Section of the model's state."""

FSDP_MODEL = "model"
"""The same in folders of Lightning's FSDPStrategy."""

TIED = "tied"
"""Section with the first names of values that have several, by their other names: both are in the model's section."""


def is_sharded_checkpoint(path: Path) -> bool:
    """Whether `path` is a complete checkpoint folder."""
    return path.is_dir() and (path / META).is_file()


# --------------------------------------------------------------------------------------------------------------- save


def folder_content(
    checkpoint: Mapping[str, Any],
    pp: DeviceMesh | None,
    further: Mapping[str, Mapping[str, Any]] = MappingProxyType({}),
    parts: Mapping[str, Parts] = MappingProxyType({}),
) -> FolderContent:
    """The part of a checkpoint that this rank writes to a folder; a collective of all ranks.

    Args:
        checkpoint: The Trainer's checkpoint with "state_dict" from `model_shares` and "optimizer_states" (if any) from
            `optimizer_state`. The rest is taken from rank 0.
        pp: The pp axis through this rank; None without pipeline parallel.
        further: More sections like that of the model.
        parts: The parts of parameters in grouped order, by FQN.

    Raises:
        CheckpointError: There are values that can't be saved; on all ranks.

    """
    sections = {MODEL: checkpoint[MODEL], **further}
    optimizers = {f"optimizer_{i}": state for i, state in enumerate(checkpoint.get("optimizer_states", []))}
    with failing_alike("gather the checkpoint"):
        sections.update({name: optimizer_shares(state["state"], parts) for name, state in optimizers.items()})
    taken = _on_stages_before({(section, fqn) for section, values in sections.items() for fqn in values}, pp)
    state: dict[str, Any] = {
        section: {fqn: value for fqn, value in values.items() if (section, fqn) not in taken}
        for section, values in sections.items()
    }
    for name in optimizers:
        state[name] = {"state": state[name]}
        if dist.get_rank() == 0:
            state[name]["param_groups"] = optimizers[name]["param_groups"]
    rest = io.BytesIO()
    with failing_alike(f"write {META}, which holds what is no state of the model or an optimizer"):
        if dist.get_rank() == 0:
            others = {key: value for key, value in checkpoint.items() if key not in (MODEL, "optimizer_states")}
            torch.save({**others, HAS_MANIFEST: True}, rest)
    return state, rest.getvalue()


def _on_stages_before(held: set[tuple[str, str]], pp: DeviceMesh | None) -> set[tuple[str, str]]:
    """Sections and names of what ranks before this one on the pp axis hold, and write; a collective there."""
    if pp is None:
        return set()
    everyone = [held] * pp.size()
    dist.all_gather_object(everyone, held, group=pp.get_group())
    return set().union(*everyone[: pp.get_local_rank()])


def check_no_others(path: Path) -> None:
    """Raise where a file is to take the place of a checkpoint folder that has files of others.

    Raises:
        CheckpointError: It has.

    """
    if others := sorted(file.name for file in path.iterdir() if not is_own(file)) if path.is_dir() else ():
        raise CheckpointError(
            f"{path} is a checkpoint folder, and a file is to take its place, but it holds {len(others)} files that are"
            f" no part of the checkpoint ({', '.join(others[:3])}). Move them away, or write to another path"
        )


# --------------------------------------------------------------------------------------------------------------- load


def read_sharded(path: Path, *, weights_only: bool | None = None) -> tuple[Folder, dict[str, Any]]:
    """Open a checkpoint folder that any layout wrote; a collective of all ranks.

    Args:
        path: The same on all ranks.
        weights_only: As in `torch.load`, for the rest of the Trainer's checkpoint.

    Returns:
        The folder, and the Trainer's checkpoint without the states in it.

    Raises:
        CheckpointError: The folder can't be read; on all ranks.

    """
    rest: dict[str, Any] = {}
    with failing_alike(f"read the checkpoint {path}"):
        if not is_sharded_checkpoint(path):
            raise CheckpointError(f"{path} is not a complete checkpoint folder: it has no {META}")
    check_files(path)
    with failing_alike(f"read the checkpoint {path}"):
        folder = Folder.open(path, weights_only=weights_only)
        rest = read_rest(path, weights_only=weights_only)
    return folder, rest


def read_rest(path: Path, *, weights_only: bool | None, map_location: Any = "cpu") -> dict[str, Any]:
    """The Trainer's checkpoint without the states in a folder; on this rank alone.

    Args:
        map_location: As in `torch.load`.

    Raises:
        CheckpointError: The folder has lost its manifest.

    """
    rest: dict[str, Any] = torch.load(path / META, map_location=map_location, weights_only=weights_only)
    if rest.pop(HAS_MANIFEST, False) and not (path / MANIFEST).is_file():
        raise CheckpointError(f"{path} is damaged: {MANIFEST} is missing. {REPAIR}")
    return rest


def load_sharded(
    folder: Folder,
    module: nn.Module,
    *,
    strict: bool,
    unread: Collection[str] | None = None,
    changed: Mapping[str, Any] = MappingProxyType({}),
) -> None:
    """Read the model's state in a checkpoint folder into `module`; a collective of all ranks.

    Args:
        module: The whole module; blocks of other stages are on the meta device and stay so.
        strict: Whether all FQNs must match; shapes must in any case.
        unread: Names in the model's state that are read from the folder; all by default.
        changed: Whole values of others, by FQN.

    Raises:
        CheckpointError: The folder can't be read or does not fit; on all ranks. If it does not fit, nothing is changed.

    """
    own = model_shares(module)
    room: dict[TreePath, Any] = {}
    with failing_alike(f"load the checkpoint {folder.location}"):
        wanted = {fqn: TensorInfo.of(value) for fqn, value in state_of(module).items()}
        found = {fqn: info for fqn, info in folder.model_tensors().items() if unread is None or fqn in unread}
        check_model(found | {fqn: TensorInfo.of(value) for fqn, value in changed.items()}, wanted, strict=strict)
        room.update(folder.room_for_model({fqn: value for fqn, value in own.items() if fqn in found}))
    loaded = folder.read(room)
    restore_model(module, {**loaded.get(MODEL, {}), **filled_from(changed, own)})


# ---------------------------------------------------------------------------------------------------------------- index


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One saved value."""

    key: str
    """Its name in the files: the path, joined by dots."""

    tensor: TensorInfo | None
    """None: it is not a tensor."""


@dataclass(frozen=True, kw_only=True)
class Folder:
    """A checkpoint folder and its index."""

    location: Path
    index: Metadata
    entries: Mapping[TreePath, Entry]
    weights_only: bool | None = None
    """As in ``torch.load``, for values that are no tensors."""

    @classmethod
    def open(cls, location: Path, *, weights_only: bool | None = None) -> Self:
        """Read the index.

        Raises:
            CheckpointError: The index has no paths, because another program wrote the folder.

        """
        metadata = FolderReader(location).read_metadata()
        if metadata.planner_data is None:
            raise CheckpointError(f"{location} was not written by this strategy or Lightning: its index has no paths")
        entries = {}
        is_of_fsdp = MODEL not in {path[0] for path in metadata.planner_data.values()}
        for key, stored in metadata.state_dict_metadata.items():
            path: TreePath = tuple(metadata.planner_data[key])
            path = (MODEL, *path[1:]) if is_of_fsdp and path[0] == FSDP_MODEL else path
            tensor = None
            if isinstance(stored, TensorStorageMetadata):
                tensor = TensorInfo(shape=tuple(stored.size), dtype=stored.properties.dtype)
            entries[path] = Entry(key=key, tensor=tensor)
        return cls(location=location, index=metadata, entries=entries, weights_only=weights_only)

    def model_tensors(self) -> dict[str, TensorInfo | None]:
        """Shapes and dtypes of the model's state, by FQN; None for what is not a tensor."""
        return self.tensors(MODEL)

    def tensors(self, section: str) -> dict[str, TensorInfo | None]:
        """The same of a section like that of the model."""
        below = {path: entry for path, entry in self.entries.items() if path[0] == section}
        return {str(path[1]): entry.tensor if len(path) == 2 else None for path, entry in below.items()}

    def optimizer_sections(self) -> list[str]:
        """The names of the sections "optimizer_0", "optimizer_1", ..., in this order."""
        sections = {str(path[0]) for path in self.entries if path[0] != MODEL and path[1] == "param_groups"}
        return [f"optimizer_{i}" for i in range(len(sections))]

    def read_groups(self, sections: Sequence[str]) -> list[list[dict[str, Any]]]:
        """The parameter groups of these sections, with FQNs in "params"; a collective of all ranks."""
        paths = [path for path in self.entries if path[0] in sections and path[1] == "param_groups"]
        read = self.read({path: self._plain_room(path) for path in paths})
        return [read[section]["param_groups"] for section in sections]

    def room_for_model(self, own: Mapping[str, Any]) -> dict[TreePath, Any]:
        """Where to read the model's state to: the shares in `own` (by FQN), and room for other values."""
        room: dict[TreePath, Any] = {}
        for path in self.entries:
            if path[0] == MODEL and path[1] in own:
                value = own[str(path[1])]
                room[path] = value if isinstance(value, Share) else self._plain_room(path)
        return room

    def read(self, room: Mapping[TreePath, Any]) -> dict[str, Any]:
        """Read into the shares in `room`, in place, and other values; a collective of all ranks.

        Args:
            room: A share or None by path; paths may differ between ranks.

        Returns:
            The tensors and other values, nested as they were saved.

        Raises:
            CheckpointError: The files can't be read; on all ranks.

        """
        found = {self.entries[path].key: share for path, share in room.items()}
        with failing_alike(f"read the checkpoint {self.location}"):
            load(found, storage_reader=FolderReader(self.location, self.index), planner=self._planner)
        leaves = [(path, tensor_of(found[self.entries[path].key])) for path in room]
        return nested(leaves) if leaves else {}

    def read_alone(self, paths: Collection[TreePath]) -> list[Any]:
        """Whole values, read by this rank alone."""
        values = {self.entries[path].key: self._plain_room(path) for path in paths}
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # as is meant here
            load(values, storage_reader=FolderReader(self.location, self.index), planner=self._planner, no_dist=True)
        return [tensor_of(values[self.entries[path].key]) for path in paths]

    def read_below(self, path: TreePath) -> Any:
        """Everything that was saved under a path, whole and nested as it was, read by this rank alone."""
        paths = [found for found in self.entries if found[: len(path)] == path]
        leaves = zip([found[len(path) :] for found in paths], self.read_alone(paths), strict=True)
        return nested([*leaves]) if paths else {}

    @property
    def _planner(self) -> FolderPlanner:
        return FolderPlanner(weights_only=self.weights_only)

    def _plain_room(self, path: TreePath) -> Share | None:
        info = self.entries[path].tensor
        return None if info is None else Share(torch.empty(info.shape, dtype=info.dtype))


def nested(leaves: Sequence[tuple[TreePath, Any]]) -> Any:
    """Values by path as the nested dictionaries and lists that they came from."""
    if len(leaves) == 1 and leaves[0][0] == ():
        return leaves[0][1]
    branches: dict[str | int, list[tuple[TreePath, Any]]] = {}
    for path, value in leaves:
        branches.setdefault(path[0], []).append((path[1:], value))
    if all(isinstance(step, int) for step in branches):
        return [nested(branches[i]) for i in range(len(branches))]
    return {step: nested(branch) for step, branch in branches.items()}
