"""State dicts of copies of the model, such as its average, that callbacks put anywhere into a Trainer's checkpoint.

Each rank has its parts of them, as of the model itself. In a folder they become sections of their own, and a note
stands in their place; in a file they are whole. Those that are read have this rank's parts again, of whatever layout.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_3d.checkpoint.box import TensorInfo, is_part
from lightning_3d.checkpoint.fail_alike import failing_alike
from lightning_3d.checkpoint.folder import MODEL, Folder
from lightning_3d.checkpoint.gathering import Gather, gather
from lightning_3d.checkpoint.own_state import state_of
from lightning_3d.checkpoint.share import Share, shares
from lightning_3d.errors import CheckpointError
from lightning_3d.tensor.placement import Parts, marked

Place = tuple[str | int, ...]
"""The way through nested dictionaries and lists to a state dict."""

_NOTE = "lightning_3d.section"
"""Key of the dictionary that stands in place of a state dict that is a section."""

_SECTION = "further_"


def states_apart(
    checkpoint: Mapping[str, Any], module: nn.Module, own: Mapping[str, Any]
) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    """A checkpoint for a folder, and the further state dicts in it by section; a collective of all ranks.

    Args:
        own: The state of the model as it was shown to the Trainer, wherever it is in the checkpoint now.

    Raises:
        CheckpointError: There are parts of tensors under names that are not the model's; on all ranks.
    """
    left, sections = dict(checkpoint), dict[str, dict[str, Any]]()
    for place in _places(checkpoint, own, is_apart=True):
        present = _present(_at(checkpoint, place), own, module, place)
        if place == (MODEL,):
            left[MODEL] = present
        else:
            section = f"{_SECTION}{len(sections)}"
            sections[section] = dict(present)
            left = _replaced(left, place, {_NOTE: section})
    return left, sections


def states_whole(
    checkpoint: Mapping[str, Any],
    module: nn.Module,
    own: Mapping[str, Any],
    gathered: Gather = gather,
) -> dict[str, Any]:
    """A checkpoint for a file: on rank 0 all state dicts in it are whole; a collective of all ranks.

    Args:
        own: As in `states_apart`; in the checkpoint it is whole on rank 0.
        gathered: Brings the values to rank 0.

    Raises:
        CheckpointError: As `states_apart`.
    """
    whole = dict(checkpoint)
    for place in _places(checkpoint, own, is_apart=False):
        state = _at(checkpoint, place)
        full = gathered(_present(state, own, module, place))
        whole = _replaced(whole, place, {key: full[key] for key in state if key in full})
    return whole


def replaced_state(checkpoint: Mapping[str, Any], own: Mapping[str, Any], whole: Mapping[str, Any]) -> dict[str, Any]:
    """A checkpoint with the whole state of the model, wherever its own was put.

    Args:
        own: As in `states_apart`.
    """
    replaced = dict(checkpoint)
    for place in [place for place, node in _walk(checkpoint) if node is own]:
        replaced = _replaced(replaced, place, whole)
    return replaced


def states_read(rest: dict[str, Any], folder: Folder, module: nn.Module) -> dict[str, Any]:
    """A checkpoint that `states_apart` left, with this rank's parts of its sections; a collective of all ranks."""
    model, parts = state_of(module), marked(module)
    notes = [place for place, node in _walk(rest) if _NOTE in node]
    for place in notes:
        section = _at(rest, place)[_NOTE]
        infos = folder.tensors(section)
        names = _names_in(model, infos)
        room: dict[Place, Any] = {}
        state: dict[str, Any] = {}
        for key, info in infos.items():
            like = model.get(names.get(key, key))
            if info is None or not isinstance(like, Tensor):
                room[section, key] = None if info is None else Share(torch.empty(info.shape, dtype=info.dtype))
            elif like.is_meta:
                state[key] = torch.empty(info.shape, dtype=info.dtype, device="meta")
            else:
                fresh = torch.empty_like(like, dtype=info.dtype, requires_grad=False)
                room[section, key] = Share(fresh, parts.get(names.get(key, key)))
        state |= folder.read(room).get(section, {}) if room else {}
        rest = _replaced(rest, place, state)
    return rest


def sections_inside(rest: dict[str, Any], read: Callable[[str], Mapping[str, Any]]) -> dict[str, Any]:
    """A checkpoint that `states_apart` left, with its sections, as they are read by name, where they were."""
    for place in [place for place, node in _walk(rest) if _NOTE in node]:
        rest = _replaced(rest, place, read(_at(rest, place)[_NOTE]))
    return rest


def has_further(folder: Folder) -> bool:
    """Whether there are sections of further state dicts."""
    return any(str(path[0]).startswith(_SECTION) for path in folder.entries)


def _places(checkpoint: Mapping[str, Any], own: Mapping[str, Any], *, is_apart: bool) -> list[Place]:
    """Where state dicts have parts of tensors on any rank, and the model's own, apart, if it is not in its place."""
    found = [
        place
        for place, node in _walk({key: value for key, value in checkpoint.items() if key != "optimizer_states"})
        if any(map(is_part, node.values())) or (is_apart and node is own and place != (MODEL,))
    ]
    everyone: list[list[Place]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(everyone, found)
    return sorted({place for places in everyone for place in places}, key=repr)


def _present(state: Mapping[str, Any], own: Mapping[str, Any], module: nn.Module, place: Place) -> dict[str, Any]:
    """The part of a state dict that this rank has: shares of tensors, and other values.

    Args:
        own: Values that are the model's under any name.
    """
    infos = {key: TensorInfo.of(value) for key, value in state.items()}
    fqns = {id(value): fqn for fqn, value in own.items() if isinstance(value, Tensor)}
    names = _names_in(state_of(module), infos) | {k: fqns[id(v)] for k, v in state.items() if id(v) in fqns}
    with failing_alike("save the checkpoint"):
        if strangers := [key for key, value in state.items() if is_part(value) and key not in names]:
            raise CheckpointError(
                f"checkpoint{''.join(f'[{step!r}]' for step in place)} has parts of tensors under names that are not"
                f" those of {type(module).__name__} ({', '.join(map(str, strangers[:3]))}), so they can't be put"
                " together. Save the state_dict of a whole copy of the model"
            )
    present = {key: value for key, value in state.items() if not (isinstance(value, Tensor) and value.is_meta)}
    parts = {key: of_key for key, of_key in _by_key(names, marked(module)).items() if is_part(state[key])}
    return shares(present, parts)


def _names_in(model: Mapping[str, Any], infos: Mapping[str, TensorInfo | None]) -> dict[str, str]:
    """Keys of a state dict -> names in the model's: the same, or without a wrapper's name, or below one module."""
    shapes = {key: info.shape for key, info in infos.items() if info is not None and isinstance(key, str)}

    def fits(key: str, fqn: str) -> bool:
        return isinstance(model.get(fqn), Tensor) and tuple(model[fqn].shape) == shapes[key]

    names = {}
    for key in shapes:
        steps = key.split(".")
        endings = [fqn for start in range(len(steps)) if fits(key, fqn := ".".join(steps[start:]))]
        names.update({key: endings[0]} if endings else {})
    if names or not shapes:
        return names
    first = next(iter(shapes))
    owners = [fqn.removesuffix(first) for fqn in model if fqn.endswith(f".{first}")]
    fitting = [owner for owner in owners if all(fits(key, owner + key) for key in shapes)]
    return {key: fitting[0] + key for key in shapes} if len(fitting) == 1 else {}


def _by_key(names: Mapping[str, str], parts: Mapping[str, Parts]) -> dict[str, Parts]:
    return {key: parts[fqn] for key, fqn in names.items() if fqn in parts}


def _walk(tree: object, place: Place = ()) -> Iterator[tuple[Place, Mapping[Any, Any]]]:
    """All dictionaries in nested dictionaries and lists, each with its place."""
    if isinstance(tree, Mapping):
        if place:
            yield place, tree
        for key, value in tree.items():
            yield from _walk(value, (*place, key))
    elif isinstance(tree, list | tuple):
        for index, value in enumerate(tree):
            yield from _walk(value, (*place, index))


def _at(checkpoint: Mapping[str, Any], place: Place) -> Mapping[str, Any]:
    """The state dict there; an empty one on a rank that has none."""
    return next((node for found, node in _walk(checkpoint) if found == place), {})


def _replaced(tree: Any, place: Place, value: object) -> Any:
    if not place:
        return value
    first, *others = place
    if isinstance(tree, Mapping):
        return {key: _replaced(old, (*others,), value) if key == first else old for key, old in tree.items()}
    return type(tree)(_replaced(old, (*others,), value) if i == first else old for i, old in enumerate(tree))
