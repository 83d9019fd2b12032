"""What a checkpoint folder holds, and reading parts of it: the index of torch.distributed.checkpoint (DCP), by path.

A path is the way through the nested dictionaries that were saved: ("state_dict", fqn), ("optimizer_0", "state", fqn,
name), ("optimizer_0", "param_groups", 0, "lr"). Reading makes room for some paths and lets DCP fill it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch
from lightning.pytorch.core.optimizer import LightningOptimizer
from torch import Tensor, nn
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.optim import Optimizer

from lightning_3d.checkpoint.box import as_box, empty_like_parameter, take_box
from lightning_3d.checkpoint.fail_alike import failing_alike
from lightning_3d.checkpoint.own_state import parameter_fqns, parameters_of
from lightning_3d.checkpoint.tensor_info import TensorInfo
from lightning_3d.errors import CheckpointError

TreePath = tuple[str | int, ...]

MODEL = "state_dict"
"""Section of the model's state."""


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
    entries: Mapping[TreePath, Entry]

    @classmethod
    def open(cls, location: Path) -> Self:
        """Read the index.

        Raises:
            CheckpointError: The index has no paths, because another program wrote the folder.

        """
        metadata = FileSystemReader(location).read_metadata()
        if metadata.planner_data is None:
            raise CheckpointError(f"{location} was not written by this strategy or Lightning: its index has no paths")
        entries = {}
        for key, stored in metadata.state_dict_metadata.items():
            path: TreePath = tuple(metadata.planner_data[key])
            tensor = None
            if isinstance(stored, TensorStorageMetadata):
                tensor = TensorInfo(shape=tuple(stored.size), dtype=stored.properties.dtype)
            entries[path] = Entry(key=key, tensor=tensor)
        return cls(location=location, entries=entries)

    def model_tensors(self) -> dict[str, TensorInfo | None]:
        """What is known of the model's state, by FQN; None for what is not a tensor."""
        below = {path: entry for path, entry in self.entries.items() if path[0] == MODEL}
        return {str(path[1]): entry.tensor if len(path) == 2 else None for path, entry in below.items()}

    def optimizer_sections(self) -> list[str]:
        """The names of the sections "optimizer_0", "optimizer_1", ..., in this order."""
        sections = {str(path[0]) for path in self.entries if path[0] != MODEL and path[1] == "param_groups"}
        return [f"optimizer_{i}" for i in range(len(sections))]

    def read_groups(self, sections: Sequence[str]) -> list[list[dict[str, Any]]]:
        """The parameter groups of these sections, with FQNs in "params"; a collective of all ranks."""
        paths = [path for path in self.entries if path[0] in sections and path[1] == "param_groups"]
        nested = self.read({path: self._plain_room(path) for path in paths})
        return [nested[section]["param_groups"] for section in sections]

    def room_for_model(self, own: Mapping[str, Any]) -> dict[TreePath, Any]:
        """Where to read the model's state to: the tensors of `own` (by FQN) themselves, and room for other values."""
        room: dict[TreePath, Any] = {}
        for path in self.entries:
            if path[0] == MODEL and path[1] in own:
                value = own[str(path[1])]
                room[path] = value if isinstance(value, Tensor) else self._plain_room(path)
        return room

    def room_for_state(
        self, section: str, module: nn.Module, optimizer: Optimizer | LightningOptimizer
    ) -> dict[TreePath, Any]:
        """Fresh tensors to read an optimizer's state to, placed as the parameters of it that this rank holds.

        Raises:
            CheckpointError: A saved state can't be placed as its parameter.

        """
        named = zip(parameter_fqns(module, optimizer), parameters_of(optimizer), strict=True)
        own = {fqn: parameter for fqn, parameter in named if not parameter.is_meta}
        room: dict[TreePath, Any] = {}
        for path, entry in self.entries.items():
            if path[:2] == (section, "state") and path[2] in own:
                parameter = own[str(path[2])]
                room[path] = None if entry.tensor is None else empty_like_parameter(parameter, entry.tensor)
        return room

    def read(self, room: Mapping[TreePath, Any]) -> dict[str, Any]:
        """Read into the tensors in `room`, in place, and other values; a collective of all ranks.

        Args:
            room: A tensor or None by path; paths may differ between ranks.

        Returns:
            The values, nested as they were saved.

        Raises:
            CheckpointError: The files can't be read; on all ranks.

        """
        boxes = {
            self.entries[path].key: as_box(target) if isinstance(target, Tensor) else target
            for path, target in room.items()
        }
        planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        with failing_alike(f"read the checkpoint {self.location}"):
            load(boxes, checkpoint_id=self.location, planner=planner)
        leaves: list[tuple[TreePath, Any]] = []
        for path, target in room.items():
            value = boxes[self.entries[path].key]
            if isinstance(target, Tensor):
                take_box(target, value)
                value = target
            leaves.append((path, value))
        return _nested(leaves) if leaves else {}

    def _plain_room(self, path: TreePath) -> Tensor | None:
        info = self.entries[path].tensor
        return None if info is None else torch.empty(info.shape, dtype=info.dtype)


def _nested(leaves: Sequence[tuple[TreePath, Any]]) -> Any:
    if len(leaves) == 1 and leaves[0][0] == ():
        return leaves[0][1]
    branches: dict[str | int, list[tuple[TreePath, Any]]] = {}
    for path, value in leaves:
        branches.setdefault(path[0], []).append((path[1:], value))
    if all(isinstance(step, int) for step in branches):
        return [_nested(branches[i]) for i in range(len(branches))]
    return {step: _nested(branch) for step, branch in branches.items()}
