"""Nested containers as flat lists of leaves; torch has no public module for it that works without optional packages."""

import dataclasses
from collections.abc import Iterable

from torch.utils import _pytree
from torch.utils._pytree import (
    TreeSpec,
    tree_flatten,
    tree_leaves,
    tree_map,
    tree_map_only,
    tree_unflatten,
)

__all__ = [
    "Args",
    "Arguments",
    "Kwargs",
    "TreeSpec",
    "forget_dataclasses",
    "register_dataclass",
    "registered_dataclasses",
    "tree_flatten",
    "tree_leaves",
    "tree_map",
    "tree_map_only",
    "tree_unflatten",
]

Args = tuple[object, ...]
Kwargs = dict[str, object]
Arguments = tuple[Args, Kwargs]
"""The positional arguments of a call, and those by name."""

_OURS = "lightning_3d:"


def register_dataclass(cls: type[object]) -> None:
    """Let a dataclass, or another plain class, be a container whose attributes are its children, but for None.

    It is put together again without a call of its ``__init__`` and ``__post_init__``, which may need more than its
    fields, and change what they get.
    """
    name = f"{_OURS}{cls.__module__}.{cls.__qualname__}:{id(cls):x}"  # one of its own, by which it can be taken back
    if issubclass(cls, (dict, list, tuple)):  # which hold something, too
        _pytree.register_dataclass(cls, serialized_type_name=name)
        return
    declared = [field.name for field in dataclasses.fields(cls)] if dataclasses.is_dataclass(cls) else []

    def flatten(value: object) -> tuple[list[object], tuple[list[str], list[str]]]:
        own = {name: getattr(value, name) for name in declared if hasattr(value, name)}
        own.update(getattr(value, "__dict__", {}))
        children = {name: child for name, child in own.items() if child is not None}
        return [*children.values()], ([*children], [name for name in own if name not in children])

    def flatten_with_keys(value: object) -> tuple[list[tuple[_pytree.KeyEntry, object]], tuple[list[str], list[str]]]:
        children, names = flatten(value)
        return [(_pytree.GetAttrKey(name), child) for name, child in zip(names[0], children, strict=True)], names

    def unflatten(children: Iterable[object], names: tuple[list[str], list[str]]) -> object:
        value = object.__new__(cls)
        for name in names[1]:
            object.__setattr__(value, name, None)
        for name, child in zip(names[0], children, strict=True):
            object.__setattr__(value, name, child)  # frozen ones refuse their own
        return value

    _pytree.register_pytree_node(
        cls, flatten, unflatten, serialized_type_name=name, flatten_with_keys_fn=flatten_with_keys
    )


def registered_dataclasses() -> list[type[object]]:
    """All classes that `register_dataclass` registered."""
    types = _pytree.SERIALIZED_TYPE_TO_PYTHON_TYPE
    return [cls for name, cls in types.items() if name.startswith(_OURS)]


def forget_dataclasses(classes: Iterable[type[object]]) -> None:
    """Let dataclasses be leaves again."""
    for cls in classes:
        _pytree._deregister_pytree_node(cls)
