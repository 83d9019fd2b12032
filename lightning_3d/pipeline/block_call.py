"""What a block gives besides its return value: tensors that it leaves in attributes, and what forward hooks see.

[Note: side outputs]
A mixture of experts leaves its auxiliary loss in ``self.aux_loss``; a model collects hidden states or router logits by
forward hooks on its layers. Glue reads both, on the last stage, where the block may be absent. So both count as outputs
of the block: they become ghosts where it is absent and cross the boundaries if a later stage uses them. While a block
runs, forward hooks on it and on the modules inside of it are only noted; they are called in glue, on every stage alike.
A hook that returns something changes an output inside of the block; it stays there.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from lightning_3d.errors import TraceError

_OWN_PACKAGES = ("torch", "lightning_3d")
_TORCH_ATTRIBUTES = frozenset(vars(nn.Module()))


@dataclass(frozen=True, kw_only=True)
class HookCall:
    """A forward hook that a call of a block makes."""

    module: str
    """Name of the hooked module in the block; empty for the block itself."""
    hook: int
    """Key of the hook in the module."""


@dataclass(frozen=True, kw_only=True)
class Observation:
    """What a forward hook is called with."""

    call: HookCall
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    output: Any

    @property
    def values(self) -> tuple[Any, ...]:
        """As a pytree."""
        return self.args, self.kwargs, self.output


@contextmanager
def hooks_noted(block: nn.Module, kept: frozenset[HookCall]) -> Iterator[list[Observation]]:
    """Note the calls of the user's forward hooks in ``block`` instead of making them.

    Args:
        kept: Hooks that are called as always.

    Yields:
        A list that fills while the block runs.
    """
    noted: list[Observation] = []
    saved = []
    for name, module in block.named_modules():
        keys = [key for key in user_hooks(module) if HookCall(module=name, hook=key) not in kept]
        if keys:
            saved.append((module, module._forward_hooks, module._forward_hooks_with_kwargs))
            module._forward_hooks = module._forward_hooks.copy()
            module._forward_hooks_with_kwargs = module._forward_hooks_with_kwargs.copy()
        for key in keys:
            module._forward_hooks[key] = _note_into(noted, HookCall(module=name, hook=key))
            module._forward_hooks_with_kwargs[key] = True
    try:
        yield noted
    finally:
        for module, hooks, with_kwargs in saved:
            module._forward_hooks, module._forward_hooks_with_kwargs = hooks, with_kwargs


def _note_into(noted: list[Observation], call: HookCall) -> Any:
    def note(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        noted.append(Observation(call=call, args=args, kwargs=kwargs, output=output))

    return note


def user_hooks(module: nn.Module) -> list[int]:
    """Keys of the forward hooks that neither torch's parallel modules nor this package registered."""
    hooks: OrderedDict[int, Any] = module._forward_hooks  # type: ignore[assignment]
    return [
        key for key, hook in hooks.items() if str(getattr(hook, "__module__", "")).split(".")[0] not in _OWN_PACKAGES
    ]


def call_hook(block: nn.Module, call: HookCall, values: Sequence[Any]) -> Any:
    """Make a call that was noted; returns what the hook returns."""
    module, (args, kwargs, output) = block.get_submodule(call.module), values
    hook = module._forward_hooks[call.hook]
    if call.hook in module._forward_hooks_with_kwargs:
        return hook(module, args, kwargs, output)
    return hook(module, args, output)


def attributes_of(block: nn.Module) -> dict[str, Any]:
    """Name -> value of what is set on the block and on the modules inside of it, besides torch's own.

    Lists, dicts and sets are copied.
    """
    return {
        f"{prefix}.{name}" if prefix else name: value.copy() if isinstance(value, (list, dict, set)) else value
        for prefix, module in block.named_modules()
        for name, value in vars(module).items()
        if name not in _TORCH_ATTRIBUTES
    }


def changed_attributes(block: nn.Module, before: dict[str, Any]) -> tuple[tuple[str, ...], frozenset[str]]:
    """What a call left in attributes.

    Args:
        before: ``attributes_of(block)`` before the call.

    Returns:
        Names of the attributes that were set to something with tensors, and of those changed otherwise.
    """
    set_to_tensors, others = [], set()
    for name, value in attributes_of(block).items():
        if name in before and _is_same(before[name], value):
            continue
        if any(isinstance(leaf, Tensor) for leaf in tree_leaves(value)) and get_attribute(block, name) is value:
            set_to_tensors.append(name)
        else:
            others.add(name)
    return tuple(set_to_tensors), frozenset(others)


def _is_same(before: Any, after: Any) -> bool:
    if isinstance(after, (list, dict, set)) and type(before) is type(after):
        old, new = (list(x.items()) if isinstance(x, dict) else list(x) for x in (before, after))
        return len(old) == len(new) and all(_is_same(a, b) for a, b in zip(old, new, strict=True))
    if isinstance(after, tuple) and isinstance(before, tuple):
        return len(before) == len(after) and all(_is_same(a, b) for a, b in zip(before, after, strict=True))
    if isinstance(after, (bool, int, float, str)):
        return type(before) is type(after) and bool(before == after)
    return before is after


def get_attribute(block: nn.Module, name: str) -> Any:
    """Value of an attribute by its name from ``attributes_of``."""
    path, _, attribute = name.rpartition(".")
    return vars(block.get_submodule(path))[attribute]


def set_attribute(block: nn.Module, name: str, value: Any) -> None:
    """Set an attribute by its name from ``attributes_of``."""
    path, _, attribute = name.rpartition(".")
    vars(block.get_submodule(path))[attribute] = value


def guard_attributes(fqn: str, block: nn.Module, names: frozenset[str]) -> None:
    """Refuse that attributes are read which a call of ``block`` changes, where the block is absent."""
    for path, attributes in _by_module(names).items():
        module = block.get_submodule(path)
        module.__class__ = _guarded_class(type(module), fqn, attributes)  # type: ignore[arg-type]  # hashable


def _by_module(names: frozenset[str]) -> dict[str, frozenset[str]]:
    modules: dict[str, set[str]] = {}
    for name in names:
        path, _, attribute = name.rpartition(".")
        modules.setdefault(path, set()).add(attribute)
    return {path: frozenset(attributes) for path, attributes in modules.items()}


@cache
def _guarded_class(cls: type[nn.Module], fqn: str, attributes: frozenset[str]) -> type[nn.Module]:
    members: dict[str, Any] = {"__module__": cls.__module__, "__qualname__": cls.__qualname__}
    members |= {name: _Guard(fqn, name) for name in attributes}
    guarded: type[nn.Module] = type(cls)(cls.__name__, (cls,), members)
    return guarded


class _Guard:
    """A descriptor in place of an attribute."""

    def __init__(self, fqn: str, name: str) -> None:
        self._fqn, self._name = fqn, name

    def __get__(self, module: nn.Module | None, cls: type[nn.Module]) -> Any:
        if module is None:
            return self
        raise TraceError(
            f"{cls.__name__}.{self._name} was read outside of the block {self._fqn}, whose forward changes it, but the"
            " block lives on another pipeline stage. Return the value from the block's forward. (Tensors that forward"
            " sets as attributes do reach later stages; numbers and changes of lists and dicts don't.)"
        )

    def __set__(self, module: nn.Module, value: Any) -> None:
        vars(module)[self._name] = value
