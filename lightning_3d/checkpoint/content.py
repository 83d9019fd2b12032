"""A checkpoint as values by path: what folders hold, what a file is gathered from, and what both are read as.

    ("state_dict", fqn)                                parameters, buffers, extra state
    ("optimizer_0", "state", fqn, name)                optimizer state, placed as its parameter, or a scalar
    ("optimizer_0", "param_groups")                    "params" lists FQNs; from rank 0
    ("callbacks", "MyEMA", "average", fqn)             tensors anywhere else of which a rank has no more than a part

The rest is rank 0's, and has a tensor on the meta device in the place of each of the last.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_3d.checkpoint.box import Share, is_part, state_share
from lightning_3d.checkpoint.collective_errors import collective_errors
from lightning_3d.distributed.agreement import gather_objects
from lightning_3d.sharding.placement import InterleavedShard, order_of

TreePath = tuple[str | int, ...]
"""The way through the nested containers of a checkpoint to a value."""

MODEL = "state_dict"
"""Key of the model's state."""

OPTIMIZERS = "optimizer_states"
"""Key of the list of optimizers' states."""


def sections(num_optimizers: int) -> list[str]:
    """The first names in the paths of optimizers' states."""
    return [f"optimizer_{i}" for i in range(num_optimizers)]


@dataclass(frozen=True, kw_only=True)
class Content:
    """A rank's share of a checkpoint."""

    values: dict[TreePath, object]
    """Shares of tensors, and values of the model's and the optimizers' states that are none."""
    metadata: dict[str, object]
    """The checkpoint without these states, with a tensor on the meta device for each share."""


def content_of(checkpoint: Mapping[str, Any], parts: Mapping[str, InterleavedShard] = MappingProxyType({})) -> Content:
    """This rank's content of a Trainer's checkpoint; a collective of all ranks.

    Args:
        checkpoint: Has "state_dict" and "optimizer_states" (if any) from `optimizer_state`, with this rank's parts of
            tensors, there and anywhere else. What this rank lacks is on the meta device.
        parts: The parts of parameters in grouped order, by FQN.

    Raises:
        CheckpointError: There are values that can't be saved; on all ranks.

    """
    values: dict[TreePath, object] = {}
    with collective_errors("gather the checkpoint"):
        for name, value in checkpoint[MODEL].items():
            if not isinstance(value, Tensor):
                values[MODEL, name] = value
            elif not value.is_meta:
                values[MODEL, name] = Share(value, parts.get(name, order_of(value)) if is_part(value) else None)
        optimizers = checkpoint.get(OPTIMIZERS, ())
        for section, state in zip(sections(len(optimizers)), optimizers, strict=True):
            for fqn, states in state["state"].items():
                for name, value in states.items():
                    share = state_share(value, parts.get(fqn)) if isinstance(value, Tensor) else value
                    values[section, "state", fqn, name] = share
            if dist.get_rank() == 0:
                values[section, "param_groups"] = state["param_groups"]
    metadata = {key: value for key, value in checkpoint.items() if key not in (MODEL, OPTIMIZERS)}
    partial = _partial_on_any_rank(metadata)

    def apart(path: TreePath, node: object) -> object:
        if path not in partial or not isinstance(node, Tensor):
            return node
        if not node.is_meta:
            values[path] = Share(node, order_of(node))
        return torch.empty(node.shape, dtype=node.dtype, device="meta")

    return Content(values=values, metadata=changed(metadata, apart))


def _partial_on_any_rank(metadata: dict[str, object]) -> set[TreePath]:
    """The paths of tensors of which some rank has a part."""
    own: set[TreePath] = set()

    def note(path: TreePath, node: object) -> object:
        own.update([path] if is_part(node) else ())
        return node

    changed(metadata, note)
    return set().union(*gather_objects(own))


def changed(node: object, change: Callable[[TreePath, object], object], path: TreePath = ()) -> Any:
    """Map a tree of dictionaries, lists and tuples, parents before children; the same object where nothing changed.

    Args:
        change: Gets paths, of names alone, and nodes; what it changes it has changed wholly.
    """
    new = change(path, node)
    if new is not node or not isinstance(node, dict | list | tuple):
        return new
    items = list(node.items() if isinstance(node, dict) else enumerate(node))
    children = {key: changed(child, change, (*path, str(key))) for key, child in items}
    if all(children[key] is child for key, child in items):
        return node
    if isinstance(node, dict):
        return children
    return getattr(type(node), "_make", type(node))(children.values())


def joined(
    values: Mapping[TreePath, object], metadata: dict[str, object], num_optimizers: int | None
) -> dict[str, Any]:
    """The checkpoint that one process would have saved.

    Args:
        values: Full values, or lazy ones, by path.
        metadata: As in `Content`.
        num_optimizers: None if their states are not saved.
    """
    checkpoint: dict[str, object] = in_place(values, metadata)
    checkpoint[MODEL] = {path[1]: value for path, value in values.items() if path[0] == MODEL}
    if num_optimizers is not None:
        checkpoint[OPTIMIZERS] = [_numbered(values, section) for section in sections(num_optimizers)]
    return checkpoint


def in_place(values: Mapping[TreePath, object], metadata: dict[str, object]) -> dict[str, object]:
    """The rest of a checkpoint with values where they were."""
    return {**changed(metadata, lambda path, node: values.get(path, node))}


def states_of(values: Mapping[TreePath, object], section: str) -> dict[str, dict[str, object]]:
    """The states of an optimizer, by FQN and name."""
    states: dict[str, dict[str, object]] = {}
    for path, value in values.items():
        if path[:2] == (section, "state"):
            states.setdefault(str(path[2]), {})[str(path[3])] = value
    return states


def _numbered(values: Mapping[TreePath, Any], section: str) -> dict[str, object]:
    """The state of an optimizer, by the numbers that torch gives to parameters."""
    groups, states = values[section, "param_groups"], states_of(values, section)
    numbers = {fqn: number for number, fqn in enumerate(fqn for group in groups for fqn in group["params"])}
    return {
        "state": {numbers[fqn]: states[fqn] for fqn in sorted(states, key=numbers.__getitem__)},
        "param_groups": [{**group, "params": [numbers[fqn] for fqn in group["params"]]} for group in groups],
    }
