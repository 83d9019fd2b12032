"""Jagged nested tensors, which are no memory to send, as the dense tensors that they are made of.

Two of them fit each other only where their offsets are the same object, so those of an argument come back as they were.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_3d.torch_internals.pytree import tree_leaves, tree_map


@dataclass
class Jagged:
    """The parts of one."""

    values: Tensor
    offsets: Tensor
    lengths: Tensor | None
    dim: int
    """The ragged one."""


def packed(tree: object) -> Any:
    """The same with dense tensors alone; the tree itself where these are."""
    return tree_map(_pack, tree) if any(map(_is_jagged, tree_leaves(tree))) else tree


def unpacked(tree: object) -> Any:
    """The inverse of `packed`."""
    if not any(map(_is_packed, tree_leaves(tree, is_leaf=_is_packed))):
        return tree
    return tree_map(lambda leaf: _unpack(leaf) if _is_packed(leaf) else leaf, tree, is_leaf=_is_packed)


def _is_packed(leaf: object) -> bool:
    return isinstance(leaf, Jagged)


def _is_jagged(leaf: object) -> bool:
    return isinstance(leaf, Tensor) and leaf.layout is torch.jagged


def _pack(leaf: Any) -> object:
    if not _is_jagged(leaf):
        return leaf
    dim = next(dim for dim, size in enumerate(leaf.shape) if not isinstance(size, int))
    return Jagged(values=leaf.values(), offsets=leaf.offsets(), lengths=leaf.lengths(), dim=dim)


def _unpack(jagged: Jagged) -> Tensor:
    made: Tensor = torch.nested.nested_tensor_from_jagged(
        jagged.values, jagged.offsets, lengths=jagged.lengths, jagged_dim=jagged.dim
    )
    return made
