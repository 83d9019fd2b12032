"""Nested containers as flat lists of leaves; torch has no public module for it that works without optional packages."""

from torch.utils._pytree import (
    TreeSpec,
    register_dataclass,
    tree_flatten,
    tree_leaves,
    tree_map,
    tree_map_only,
    tree_unflatten,
)

__all__ = [
    "TreeSpec",
    "register_dataclass",
    "tree_flatten",
    "tree_leaves",
    "tree_map",
    "tree_map_only",
    "tree_unflatten",
]
