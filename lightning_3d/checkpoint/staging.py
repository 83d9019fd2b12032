"""A copy of what is to be saved, in the memory of the host, that training does not change."""

from __future__ import annotations

from copy import deepcopy
from typing import TypeVar

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from lightning_3d.torch_internals.dtensor import placed
from lightning_3d.torch_internals.pytree import tree_map

_Tree = TypeVar("_Tree")


@torch.no_grad()
def staged(tree: _Tree) -> _Tree:
    """Copies of the tensors in nested containers on the CPU, and of everything else; tensors in two places stay one."""
    copies: dict[int, Tensor] = {}

    def copied(leaf: object) -> object:
        if not isinstance(leaf, Tensor):
            return deepcopy(leaf)
        if id(leaf) not in copies:
            copies[id(leaf)] = _on_host(leaf)
        return copies[id(leaf)]

    found: _Tree = tree_map(copied, tree)
    return found


def _on_host(tensor: Tensor) -> Tensor:
    if not isinstance(tensor, DTensor):
        return tensor.detach().to("cpu", copy=True)
    local = tensor.to_local().detach().to("cpu", copy=True)
    return placed(local, tensor.device_mesh, tensor.placements, tensor.shape, tensor.stride())
