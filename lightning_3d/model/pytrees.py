"""Pytrees of what steps and blocks take and return."""

from __future__ import annotations

import dataclasses
from collections import UserDict, deque
from collections.abc import Callable, Sequence
from copy import copy
from functools import partial
from operator import is_
from types import FunctionType
from typing import Any

from torch import Tensor, nn

from lightning_3d.torch_internals.pytree import register_dataclass, tree_flatten, tree_leaves, tree_map, tree_unflatten

Container = list[object] | dict[object, object]

_LISTS: Any = (list, deque)


def register_dataclasses(tree: object) -> None:
    """Make dataclasses that hold tensors known to torch's pytrees, through which FSDP2 finds the tensors as well.

    The same holds for a ``UserDict``, which blocks may fill, as transformers' layers that share keys and values do.
    """
    for leaf in tree_leaves(tree):
        if isinstance(leaf, UserDict):
            register_dataclass(type(leaf))
            register_dataclasses(leaf)
        elif dataclasses.is_dataclass(leaf) and not isinstance(leaf, type):
            values = [getattr(leaf, field.name, None) for field in dataclasses.fields(leaf)]
            register_dataclasses(values)
            if holds_tensors(values):
                register_dataclass(type(leaf))
                register_dataclasses(leaf)


def flatten_call(
    args: tuple[object, ...], kwargs: dict[str, object]
) -> tuple[list[Any], Callable[[list[Any]], tuple[tuple[object, ...], dict[str, object]]]]:
    """The leaves among the arguments of a call, and what makes arguments of other leaves; fast for plain tensors."""
    if not kwargs and all(isinstance(arg, Tensor) for arg in args):
        return list(args), lambda leaves: (tuple(leaves), {})
    leaves, spec = tree_flatten((args, kwargs))
    return leaves, partial(tree_unflatten, treespec=spec)


def with_replaced_leaves(tree: object, replace: Callable[[object], object]) -> Any:
    """A tree with other leaves; lists and dicts get them and stay the objects that they are."""
    if isinstance(tree, Tensor):
        return replace(tree)
    if isinstance(tree, tuple):
        children = [with_replaced_leaves(child, replace) for child in tree]
        if all(map(is_, children, tree)):
            return tree
        return type(tree)(*children) if hasattr(tree, "_fields") else tuple(children)
    if isinstance(tree, (list, deque, dict)):
        for key, child in [*(tree.items() if isinstance(tree, dict) else enumerate(tree))]:
            if (new := with_replaced_leaves(child, replace)) is not child:
                tree[key] = new
        return tree
    leaves, spec = tree_flatten(tree)
    replaced = [replace(leaf) for leaf in leaves]
    return tree if all(map(is_, replaced, leaves)) else tree_unflatten(replaced, spec)


def holds_tensors(tree: object) -> bool:
    """Whether a leaf is a tensor."""
    return any(isinstance(leaf, Tensor) for leaf in tree_leaves(tree))


def argument_containers(args: tuple[object, ...], kwargs: dict[str, object]) -> list[Container]:
    """The lists and dicts in nested tuples, lists and dicts among the arguments of a call, in a fixed order."""
    return _containers_of((*args, *kwargs.values()))


def _containers_of(tree: object) -> list[Container]:
    tree = tree.data if isinstance(tree, UserDict) else tree
    if not isinstance(tree, (dict, list, tuple)):
        return []
    children = tree.values() if isinstance(tree, dict) else tree
    inner = [found for child in children for found in _containers_of(child)]
    return inner if isinstance(tree, tuple) else [tree, *inner]


def changed_containers(containers: Sequence[Container], before: Sequence[Container]) -> tuple[int, ...]:
    """Indices of the containers that have another content than ``before``."""
    return tuple(i for i, (old, new) in enumerate(zip(before, containers, strict=True)) if not is_same(old, new))


def is_same(before: Any, after: Any) -> bool:
    """Whether two values are one object, or plain values or containers of the same content; lists count as deques."""
    if before is after:
        return True
    if isinstance(before, dict) and isinstance(after, dict):
        return is_same(list(before.items()), list(after.items()))
    if any(isinstance(before, kind) and isinstance(after, kind) for kind in (_LISTS, tuple)):
        return len(before) == len(after) and all(map(is_same, before, after))
    is_plain = isinstance(after, (bool, int, float, str, bytes, set)) and type(before) is type(after)
    return is_plain and bool(before == after)


def is_opaque(value: object) -> bool:
    """Whether it is an object that may hold tensors where pytrees don't find them, as key-value caches do."""
    return bool(getattr(value, "__dict__", None)) and not isinstance(value, (Tensor, nn.Module, type, FunctionType))


def as_called(tree: object) -> Any:
    """Arguments for one run of a block, which may change the opaque objects among them."""
    return tree_map(lambda leaf: copied(leaf) if is_opaque(leaf) else leaf, tree)


def copied(value: object, memo: dict[int, object] | None = None) -> object:
    """A copy of an opaque object, of the objects, lists and dicts in it and so on; tensors and modules are kept."""
    memo = {} if memo is None else memo
    if id(value) in memo:
        return memo[id(value)]
    if not isinstance(value, (list, dict)) and not is_opaque(value):
        return value
    new = memo[id(value)] = copy(value)
    if isinstance(new, list):
        new[:] = [copied(child, memo) for child in new]
    elif isinstance(new, dict):
        new.update({key: copied(child, memo) for key, child in new.items()})
    if is_opaque(value):
        vars(new).update({name: copied(child, memo) for name, child in vars(new).items()})
    return new


def tensor_positions(leaves: Sequence[object]) -> dict[int, int]:
    """Id of a tensor -> its first position, in order."""
    positions: dict[int, int] = {}
    for i, leaf in enumerate(leaves):
        if isinstance(leaf, Tensor):
            positions.setdefault(id(leaf), i)
    return positions
