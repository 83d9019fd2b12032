"""FSDP2's units as their authors wrote them: the class that it derives from each, and the hooks that it adds."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import MethodType
from typing import Any

from torch import nn
from torch.distributed._composable.contract import REGISTRY_KEY, STATE_KEY
from torch.distributed.fsdp import FSDPModule

_COPY = "__deepcopy__"

_OWN = ("torch.distributed.fsdp.", "lightning_3d.")
"""Beginnings of the modules whose hooks serve units."""


@contextmanager
def without_units(module: nn.Module) -> Iterator[None]:
    """Let the units in a module be modules of their own class inside, whose calls gather nothing."""
    with ExitStack() as stack:
        for inner in list(module.modules()):
            before = (inner._state_dict_pre_hooks, inner._load_state_dict_pre_hooks)
            for hooks in (*before, inner._load_state_dict_post_hooks):
                stack.enter_context(_without_hooks(hooks))
            if isinstance(inner, FSDPModule):
                stack.enter_context(_without_unit(inner))
        yield


@contextmanager
def _without_unit(unit: nn.Module) -> Iterator[None]:
    derived, attributes = type(unit), vars(unit)
    added = {name: attributes.pop(name) for name in (_COPY, STATE_KEY, REGISTRY_KEY) if name in attributes}
    _, unit.__class__ = derived.__bases__
    with ExitStack() as stack:
        for hooks in (unit._forward_pre_hooks, unit._forward_hooks):
            stack.enter_context(_without_hooks(hooks))
        try:
            yield
        finally:
            unit.__class__ = derived
            attributes.update(added)


@contextmanager
def _without_hooks(hooks: dict[int, Any]) -> Iterator[None]:
    """Let FSDP2's hooks and our own be out of a registry inside; it may be changed there."""
    before = dict(hooks)
    added = {key for key, hook in before.items() if str(getattr(hook, "__module__", "")).startswith(_OWN)}
    for key in added:
        del hooks[key]
    try:
        yield
    finally:
        now = dict(hooks)
        hooks.clear()
        hooks.update((key, hook) for key, hook in before.items() if key in now or key in added)
        hooks.update(now)


def let_be_copied(unit: FSDPModule) -> None:
    """Let ``copy.deepcopy`` make a module of the author's class, with shards of its own, which FSDP2 refuses."""
    assert isinstance(unit, nn.Module)
    vars(unit)[_COPY] = MethodType(_copied, unit)


def _copied(unit: nn.Module, memo: dict[int, Any]) -> Any:
    assert isinstance(unit, FSDPModule)
    unit.reshard()
    with without_units(unit):
        return copy.deepcopy(unit, memo)
