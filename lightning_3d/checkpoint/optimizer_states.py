"""The states of optimizers in a checkpoint of any layout: this rank's part of them.

In a file they are whole and keyed by torch's indices; in a folder they are keyed by FQN and read as they are placed,
but for those that a hook of the user's has looked at or changed, which are whole.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lightning.pytorch.core.optimizer import LightningOptimizer
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_3d.checkpoint.box import TensorInfo, empty_state, fill
from lightning_3d.checkpoint.fail_alike import failing_alike
from lightning_3d.checkpoint.folder import Folder, TreePath
from lightning_3d.checkpoint.match import by_fqn, check_groups, check_num_optimizers
from lightning_3d.checkpoint.own_state import has_no_parameters, optimizer_state, restore_optimizer, stepped_parameters
from lightning_3d.checkpoint.saved_state import SavedState
from lightning_3d.checkpoint.share import state_share
from lightning_3d.tensor.placement import Parts, marked
from lightning_3d.torch_internals.pytree import tree_map_only
from lightning_3d.zero.shard import NO_SHARDS, Shards


def saved_optimizers(folder: Folder) -> list[dict[str, Any]]:
    """The states in a folder, by FQN, as hooks see them and `load_optimizers` takes them; a collective of all ranks."""
    sections = folder.optimizer_sections()
    groups = folder.read_groups(sections)
    return [
        {"state": SavedState(folder, (section, "state")), "param_groups": of_section}
        for section, of_section in zip(sections, groups, strict=True)
    ]


def load_optimizers(
    states: Sequence[Mapping[str, Any]],
    module: nn.Module,
    optimizers: Sequence[Optimizer | LightningOptimizer],
    *,
    strict: bool,
    shards: Shards = NO_SHARDS,
) -> None:
    """Give optimizers this rank's part of saved states; a collective of all ranks.

    Args:
        states: `{"state": {key: {name: value}}, "param_groups": [{"params": [key, ...], ...}]}` of each, in the order
            of `optimizers`; keys are torch's indices or FQNs.
        module: The whole module; blocks of other stages are on the meta device.
        strict: Whether the FQNs of each group must be the same.
        shards: As in `optimizer_state`.

    Raises:
        CheckpointError: They do not fit, or can't be read; on all ranks, before any optimizer is changed.

    """
    room: dict[TreePath, Any] = {}
    given: list[dict[str, dict[str, Any]]] = []
    saved: list[dict[str, Any]] = []
    folder: Folder | None = None
    parts = marked(module)
    with failing_alike("load the states of optimizers"):
        check_num_optimizers(len(states), len(optimizers))
        for i, optimizer in enumerate(optimizers):
            if has_no_parameters(optimizer):
                saved.append({"state": {}, "param_groups": []})
                given.append({})
                continue
            groups = optimizer_state(module, optimizer)["param_groups"]
            saved.append(by_fqn(states[i], groups, optimizer=i))
            check_groups(saved[i]["param_groups"], groups, optimizer=i, strict=strict)
            stepped = stepped_parameters(module, optimizer, shards)
            state = saved[i]["state"]
            if isinstance(state, SavedState):
                folder = state.folder
                unread, state = state.split()
                wanted = {fqn: stepped[fqn] for fqn in stepped if fqn in unread}
                room.update(_room(saved[i]["state"], wanted, shards, parts))
            given.append(
                {
                    fqn: {
                        name: _part_of(value, parameter, shards, parts.get(fqn)) for name, value in state[fqn].items()
                    }
                    for fqn, parameter in stepped.items()
                    if fqn in state
                }
            )
    loaded = {} if folder is None else folder.read(room)
    for i, optimizer in enumerate(optimizers):
        if has_no_parameters(optimizer):
            continue
        state = saved[i]["state"]
        read = loaded.get(str(state.path[0]), {}).get("state", {}) if isinstance(state, SavedState) else {}
        own = {"state": {**given[i], **read}, "param_groups": saved[i]["param_groups"]}
        restore_optimizer(module, optimizer, own, shards)


def _room(
    state: SavedState, parameters: Mapping[str, nn.Parameter], shards: Shards, parts: Mapping[str, Parts]
) -> dict[TreePath, Any]:
    """Fresh tensors to read states to, placed as these parameters."""
    room: dict[TreePath, Any] = {}
    for path, entry in state.folder.entries.items():
        if path[:2] == state.path and (fqn := str(path[2])) in parameters:
            info = entry.tensor
            fresh = None if info is None else empty_state(parameters[fqn], info, shards)
            room[path] = None if fresh is None else state_share(fresh, parts.get(fqn))
    return room


def _part_of(value: object, parameter: nn.Parameter, shards: Shards, parts: Parts | None) -> object:
    if not isinstance(value, Tensor):
        return tree_map_only(Tensor, Tensor.clone, value)  # of parameters that this rank steps whole
    part = empty_state(parameter, TensorInfo(shape=tuple(value.shape), dtype=value.dtype), shards)
    fill(part, value, state_share(part, parts).parts)
    return part
