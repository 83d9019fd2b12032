"""The model's state that this rank holds, by FQN: that of its own blocks, in whatever placement.

Parameters and buffers of blocks on other pipeline ranks are on the meta device. Their names, shapes and order are known
here, so every rank sees the same list of FQNs; their values are left out.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextvars import ContextVar
from copy import copy
from typing import Any

from torch import Tensor, nn

from lightning_3d.checkpoint.box import Share
from lightning_3d.checkpoint.collective_errors import collective_errors
from lightning_3d.checkpoint.lazy import info_of, made, take, unread
from lightning_3d.checkpoint.match import check_model
from lightning_3d.model.absent import stand_in
from lightning_3d.sharding.placement import interleaved_parameters
from lightning_3d.torch_internals.modules import named_state

expects_parts: ContextVar[bool] = ContextVar("expects_parts", default=False)
"""Whether the code that calls ``state_dict()`` knows that it gets parts."""


def state_of(module: nn.Module) -> dict[str, object]:
    """``module.state_dict()`` for code that knows that it has this rank's parts."""
    token = expects_parts.set(True)
    try:
        return module.state_dict()
    finally:
        expects_parts.reset(token)


def like_state(state: dict[str, object], values: Mapping[str, object]) -> dict[str, object]:
    """Values by FQN in the form and order of ``module.state_dict()``, which tells versions of modules, too."""
    formed = copy(state)
    formed.clear()
    formed.update({name: values[name] for name in (*(name for name in state if name in values), *values)})
    return formed


def held_names(state: Mapping[str, object]) -> set[str]:
    """Names of what this rank holds of a model's state."""
    present = {fqn: not value.is_meta for fqn, value in state.items() if isinstance(value, Tensor)}
    for fqn in state.keys() - present.keys():
        # Extra state belongs to the pipeline ranks that hold some of the tensors in its module, if there are any.
        owner = fqn.removesuffix(fqn.rpartition(".")[2])
        tensors = [is_present for other, is_present in present.items() if other.startswith(owner)]
        present[fqn] = any(tensors) or not tensors
    return {fqn for fqn, is_present in present.items() if is_present}


def state_for_hooks(module: nn.Module) -> dict[str, object]:
    """The model's state as hooks that save a checkpoint see it, under the names of one process on every rank.

    In place of tensors that another stage saves there are stand-ins, which have shapes alone. So a hook that drops,
    renames or adds entries does so on all ranks alike, and one that needs the values of a stand-in raises.
    """
    state, shown = state_of(module), dict[str, object]()
    held = held_names(state)
    for fqn, value in state.items():
        if fqn in held:
            shown[fqn] = value
        elif isinstance(value, Tensor):
            place = "lies on another pipeline stage, which saves it"
            shown[fqn] = stand_in(value, f"checkpoint['state_dict'][{fqn!r}]", module, place)
    return like_state(state, shown)


def load_model(saved: Mapping[str, Any], module: nn.Module, *, strict: bool) -> None:
    """Give a model this rank's part of a saved state; a collective of all ranks.

    Args:
        saved: By FQN: full tensors, lazy ones, or shards as the module itself has them.
        module: The whole module; blocks of other stages are on the meta device and stay so.
        strict: Whether all FQNs must match; shapes must in any case.

    Raises:
        CheckpointError: The state does not fit, or can't be read; on all ranks. If it does not fit, nothing is changed.

    """
    state, parts, saved = state_of(module), interleaved_parameters(module), unread(saved)
    held = held_names(state)
    loaded = {fqn: value for fqn, value in state.items() if fqn in held and fqn in saved}
    with collective_errors("load the checkpoint"):
        found, wanted = ({fqn: info_of(value) for fqn, value in values.items()} for values in (saved, state))
        check_model(found, wanted, strict=strict)
        for fqn, value in loaded.items():
            if isinstance(value, Tensor):
                take(Share(value, parts.get(fqn)), saved[fqn])
            else:
                loaded[fqn] = made(saved[fqn])
    # Tensors alias the parameters, so this moves no other data; it runs the module's hooks and sets extra state.
    module.load_state_dict(loaded, strict=False)


def tied_fqns(module: nn.Module) -> dict[str, str]:
    """The first FQN of every parameter and buffer that has several, by its other FQNs."""
    first: dict[Tensor, str] = {}
    tied: dict[str, str] = {}
    for fqn, tensor, _ in named_state(module):
        if first.setdefault(tensor, fqn) != fqn:
            tied[fqn] = first[tensor]
    return tied
