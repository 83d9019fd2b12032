"""Activations that a block keeps in attributes, as ``self.weights = weights``, for whoever reads them later."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from lightning_3d.tensor.rules.grouped import GroupedTensor
from lightning_3d.tensor.run.grouped_calls import whole
from lightning_3d.tensor.run.partial_sums import PartialSum
from lightning_3d.tensor.run.sharded_activation import ShardedActivation
from lightning_3d.tensor.run.sharded_output import as_unread
from lightning_3d.torch_internals.modules import BUFFERS
from lightning_3d.torch_internals.pytree import tree_leaves, tree_map

_HANDLES = (ShardedActivation, GroupedTensor, PartialSum)

_TORCH_ATTRIBUTES = frozenset(vars(nn.Module()))


class KeptActivations:
    """The attributes of a block's modules, buffers among them, after its forwards on shards.

    Args:
        block: Whose modules stay the same.
    """

    def __init__(self, block: nn.Module) -> None:
        self._modules = list(block.modules())

    def show(self) -> None:
        """Let sharded activations in them be full tensors to their readers."""
        for module in self._modules:
            attributes = vars(module)
            _show(attributes, _TORCH_ATTRIBUTES)
            _show(attributes[BUFFERS], frozenset())


def _show(attributes: dict[str, Any], hidden: frozenset[str]) -> None:
    for name, value in attributes.items():
        if name not in hidden and _holds_handle(value):
            attributes[name] = tree_map(_shown, value)


def _holds_handle(value: object) -> bool:
    if isinstance(value, Tensor):
        return isinstance(value, _HANDLES)
    return isinstance(value, list | tuple | dict) and any(isinstance(leaf, _HANDLES) for leaf in tree_leaves(value))


def _shown(leaf: Any) -> Any:
    if isinstance(leaf, ShardedActivation):
        return as_unread(leaf)
    return whole(leaf) if isinstance(leaf, GroupedTensor | PartialSum) else leaf
