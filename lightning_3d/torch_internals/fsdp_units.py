"""FSDP2's units as their authors wrote them: the class that it derives from each, and the hooks that it adds."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import ExitStack
from types import MethodType

from torch import nn
from torch.distributed._composable.contract import REGISTRY_KEY, STATE_KEY
from torch.distributed._composable_state import _module_state_mapping
from torch.distributed.fsdp import FSDPModule

_COPY = "__deepcopy__"

_OWN = ("torch.distributed.fsdp.", "lightning_3d.")
"""Beginnings of the modules whose hooks serve units."""


def without_units(module: nn.Module) -> ExitStack:
    """Let the units in a module be modules of their own class, whose calls gather nothing, until the end of what this
    returns.
    """
    undone = ExitStack()
    for inner in list(module.modules()):
        loading = (inner._load_state_dict_pre_hooks, inner._load_state_dict_post_hooks)
        for hooks in (inner._state_dict_pre_hooks, inner._state_dict_hooks, *loading):
            undone.enter_context(_without_hooks(hooks))
        if isinstance(inner, FSDPModule):
            undone.enter_context(_without_unit(inner))
    return undone


def reshard_units(module: nn.Module) -> None:
    """Let the units in a module, which the last forward may have left gathered, show the Parameters that optimizers
    have, of which each rank holds a part.
    """
    for unit in module.modules():
        if isinstance(unit, FSDPModule):
            unit.reshard()


def forget_units(module: nn.Module) -> None:
    """Let the modules of a module, which are no units any more, become others."""
    for inner in module.modules():
        _module_state_mapping.pop(inner, None)


def _without_unit(unit: nn.Module) -> ExitStack:
    derived, attributes = type(unit), vars(unit)
    added = {name: attributes.pop(name) for name in (_COPY, STATE_KEY, REGISTRY_KEY) if name in attributes}
    _, unit.__class__ = derived.__bases__
    undone = ExitStack()
    undone.callback(attributes.update, added)
    undone.callback(setattr, unit, "__class__", derived)
    for hooks in (unit._forward_pre_hooks, unit._forward_hooks):
        undone.enter_context(_without_hooks(hooks))
    return undone


def _without_hooks(hooks: dict[int, Callable[..., object]]) -> ExitStack:
    """Let FSDP2's hooks and our own be out of a registry, which may be changed, until the end of what this returns."""
    before = dict(hooks)
    added = {key for key, hook in before.items() if str(getattr(hook, "__module__", "")).startswith(_OWN)}
    for key in added:
        del hooks[key]

    def put_back() -> None:
        now = dict(hooks)
        hooks.clear()
        hooks.update((key, hook) for key, hook in before.items() if key in now or key in added)
        hooks.update(now)

    undone = ExitStack()
    undone.callback(put_back)
    return undone


def let_be_copied(unit: FSDPModule) -> None:
    """Let ``copy.deepcopy`` make a module of the author's class, with shards of its own, which FSDP2 refuses."""
    assert isinstance(unit, nn.Module)
    vars(unit)[_COPY] = MethodType(_copied, unit)


def _copied(unit: nn.Module, memo: dict[int, object]) -> object:
    assert isinstance(unit, FSDPModule)
    unit.reshard()
    with without_units(unit):
        return copy.deepcopy(unit, memo)
