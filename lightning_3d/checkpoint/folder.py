"""Checkpoints as folders: every rank writes what it holds, and reads what it needs of what others wrote.

The layout is that of Lightning's ModelParallelStrategy: files of torch.distributed.checkpoint (DCP) with the values of
`content`, by their paths, and `meta.pt` with the rest of the Trainer's checkpoint. Lightning's FSDPStrategy calls the
model's section `model`.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.device_mesh import DeviceMesh

from lightning_3d.checkpoint.atomic import MANIFEST, META
from lightning_3d.checkpoint.box import Share, TensorInfo
from lightning_3d.checkpoint.checksums import REPAIR
from lightning_3d.checkpoint.collective_errors import collective_errors
from lightning_3d.checkpoint.content import MODEL, Content, TreePath
from lightning_3d.checkpoint.lazy import LazyTensor
from lightning_3d.checkpoint.reading import FolderPlanner, FolderReader, unpickling
from lightning_3d.checkpoint.writing import HAS_MANIFEST, FolderContent
from lightning_3d.distributed.agreement import gather_objects
from lightning_3d.errors import CheckpointError

FSDP_MODEL = "model"
"""Section of the model's state in folders of Lightning's FSDPStrategy."""

TIED = "tied"
"""Section with the first names of values that have several, by their other names: both are in the model's section."""


def is_sharded_checkpoint(path: Path) -> bool:
    """Whether `path` is a complete checkpoint folder."""
    return path.is_dir() and (path / META).is_file()


def folder_content(content: Content, pp: DeviceMesh | None, tied: Mapping[str, str]) -> FolderContent:
    """This rank's part of a checkpoint folder, for `write_folder`; a collective of all ranks.

    Of a value that several pipeline ranks hold the lowest one writes it: they may have it in different shares.

    Args:
        pp: The pp axis through this rank; None without pipeline parallel.
        tied: The first names of values that have several, by their other names.

    Raises:
        CheckpointError: There are values that can't be saved; on all ranks.

    """
    taken: set[TreePath] = set()
    if pp is not None:
        taken = taken.union(*gather_objects(set(content.values), pp.get_group())[: pp.get_local_rank()])
    state: dict[str, Any] = {TIED: dict(tied)}
    for path, value in content.values.items():
        if path not in taken:
            *way, name = map(str, path)
            section = state
            for step in way:
                section = section.setdefault(step, {})
            section[name] = value
    metadata = io.BytesIO()
    with collective_errors(f"write {META}, which holds what is no state of the model or an optimizer"):
        if dist.get_rank() == 0:
            torch.save({**content.metadata, HAS_MANIFEST: True}, metadata)
    return state, metadata.getvalue()


@dataclass(frozen=True, kw_only=True)
class Folder:
    """A checkpoint folder and its index, read by this rank alone."""

    location: Path
    index: Metadata
    entries: Mapping[TreePath, str]
    """Paths -> names in the files."""
    weights_only: bool | None = None
    """As in ``torch.load``, for values that are no tensors."""

    @classmethod
    def open(cls, location: Path, *, weights_only: bool | None = None) -> Self:
        """Read the index.

        Raises:
            CheckpointError: The index has no paths, because another program wrote the folder.

        """
        if not is_sharded_checkpoint(location):
            raise CheckpointError(f"{location} is not a complete checkpoint folder: it has no {META}")
        index = FolderReader(location).read_metadata()
        if index.planner_data is None:
            raise CheckpointError(f"{location} was not written by this strategy or Lightning: its index has no paths")
        is_of_fsdp = MODEL not in {path[0] for path in index.planner_data.values()}
        entries: dict[TreePath, str] = {}
        for key in index.state_dict_metadata:
            first, *others = index.planner_data[key]
            entries[MODEL if is_of_fsdp and first == FSDP_MODEL else first, *others] = key
        return cls(location=location, index=index, entries=entries, weights_only=weights_only)

    @property
    def num_optimizers(self) -> int:
        """The number of sections `optimizer_0`, `optimizer_1`, ..."""
        return len({path[0] for path in self.entries if path[1:2] == ("param_groups",) and is_of_optimizer(path)})

    def values(self, wanted: Callable[[TreePath], bool] = lambda path: True) -> dict[TreePath, object]:
        """The values in it, by paths as in `content`, with a `LazyTensor` for each tensor.

        Args:
            wanted: Chooses some by path; others are not unpickled.
        """
        entries = {path: key for path, key in self.entries.items() if wanted(path)}
        stored: dict[str, object] = {}
        for key in entries.values():
            found = self.index.state_dict_metadata[key]
            if isinstance(found, TensorStorageMetadata):
                info = TensorInfo(shape=tuple(found.size), dtype=found.properties.dtype)
                make, read = partial(self._full, key, info), partial(self._read, key)
                stored[key] = LazyTensor(info=info, make=make, read=read)
        plain = dict.fromkeys(key for key in entries.values() if key not in stored)
        self._load(plain)
        units: dict[TreePath, list[tuple[TreePath, object]]] = {}
        for path, key in entries.items():
            unit = _unit(path)
            units.setdefault(unit, []).append((path[len(unit) :], stored.get(key, plain.get(key))))
        return {unit: _nested(leaves) for unit, leaves in units.items()}

    def content(self, wanted: Callable[[TreePath], bool] = lambda path: True) -> Content:
        """All that is in it, or that is wanted.

        Raises:
            CheckpointError: It has lost its manifest, or holds what may not be unpickled.

        """
        values = self.values(wanted)
        with unpickling(self.location):
            metadata = torch.load(self.location / META, map_location="cpu", mmap=True, weights_only=self.weights_only)
        if metadata.pop(HAS_MANIFEST, False) and not (self.location / MANIFEST).is_file():
            raise CheckpointError(f"{self.location} is damaged: {MANIFEST} is missing. {REPAIR}")
        return Content(values=values, metadata=metadata)

    def _full(self, key: str, info: TensorInfo) -> Tensor:
        full = torch.empty(info.shape, dtype=info.dtype)
        self._read(key, Share(full))
        return full

    def _read(self, key: str, share: Share) -> None:
        self._load({key: share})

    def _load(self, values: dict[str, object]) -> None:
        """Read into shares, and put other values in their place."""
        reader, planner = FolderReader(self.location, self.index), FolderPlanner(weights_only=self.weights_only)
        with unpickling(self.location):
            reader.set_up_storage_reader(self.index, is_coordinator=True)
            planner.set_up_planner(values, self.index, is_coordinator=True)
            reader.read_data(planner.create_local_plan(), planner).wait()


def is_of_optimizer(path: TreePath) -> bool:
    """Whether a path is that of a state of an optimizer, or of its groups."""
    return str(path[0]).startswith("optimizer_")


def _unit(path: TreePath) -> TreePath:
    """The path in `content` of the value that this one is in."""
    if is_of_optimizer(path):
        return path[: 4 if path[1:2] == ("state",) else 2]
    return path[:2] if path[0] == MODEL else path


def _nested(leaves: Sequence[tuple[TreePath, object]]) -> object:
    """Values by path as the nested dictionaries and lists that they came from."""
    if len(leaves) == 1 and leaves[0][0] == ():
        return leaves[0][1]
    branches: dict[str | int, list[tuple[TreePath, object]]] = {}
    for path, value in leaves:
        branches.setdefault(path[0], []).append((path[1:], value))
    if all(isinstance(step, int) for step in branches):
        return [_nested(branches[i]) for i in range(len(branches))]
    return {step: _nested(branch) for step, branch in branches.items()}
