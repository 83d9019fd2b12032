"""Activations that a block retains in attributes, as ``self.weights = weights``, for whoever reads them later."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from lightning_3d.tensor.sharded_tensor import ShardedTensor, shard_dim
from lightning_3d.tensor.vocabulary.sharded_output import as_unread
from lightning_3d.torch_internals.modules import BUFFERS, TORCH_ATTRIBUTES
from lightning_3d.torch_internals.pytree import tree_leaves, tree_map

Whole = Callable[[Tensor], Tensor]
"""Makes a sharded tensor whole."""


class RetainedActivations:
    """The attributes of a block's modules, buffers among them, after its forwards on shards.

    Args:
        block: Whose modules stay the same.
    """

    def __init__(self, block: nn.Module) -> None:
        self._modules = list(block.modules())

    def show(self, whole: Whole) -> None:
        """Replace sharded tensors in them by full ones, which are gathered when they are read."""
        for module in self._modules:
            attributes = vars(module)
            _show(attributes, TORCH_ATTRIBUTES, whole)
            _show(attributes[BUFFERS], frozenset(), whole)


def _show(attributes: dict[str, Any], hidden: frozenset[str], whole: Whole) -> None:
    for name, value in attributes.items():
        if name not in hidden and _holds_sharded_tensor(value):
            attributes[name] = tree_map(functools.partial(_shown, whole), value)


def _holds_sharded_tensor(value: object) -> bool:
    if isinstance(value, Tensor):
        return isinstance(value, ShardedTensor)
    if not isinstance(value, list | tuple | dict):
        return False
    return any(isinstance(leaf, ShardedTensor) for leaf in tree_leaves(value))


def _shown(whole: Whole, leaf: Any) -> Any:
    if not isinstance(leaf, ShardedTensor):
        return leaf
    return whole(leaf) if shard_dim(leaf) is None else as_unread(leaf)
