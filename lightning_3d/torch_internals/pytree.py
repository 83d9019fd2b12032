"""Nested containers as flat lists of leaves; torch has no public module for it that works without optional packages."""

from collections.abc import Iterable
from typing import Any

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

_OURS = "lightning_3d:"


def register_dataclass(cls: type[Any]) -> None:
    """Let a dataclass be a container whose fields are its children."""
    name = f"{_OURS}{cls.__module__}.{cls.__qualname__}:{id(cls):x}"  # one of its own, by which it can be taken back
    _pytree.register_dataclass(cls, serialized_type_name=name)


def registered_dataclasses() -> list[type[Any]]:
    """All classes that `register_dataclass` registered."""
    types = _pytree.SERIALIZED_TYPE_TO_PYTHON_TYPE
    return [cls for name, cls in types.items() if name.startswith(_OURS)]


def forget_dataclasses(classes: Iterable[type[Any]]) -> None:
    """Let dataclasses be leaves again."""
    for cls in classes:
        _pytree._deregister_pytree_node(cls)
