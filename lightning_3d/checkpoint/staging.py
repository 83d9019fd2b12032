"""Copies of what is to be saved, in the memory of the host, that training does not change."""

from __future__ import annotations

from collections import defaultdict
from copy import deepcopy
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from lightning_3d.checkpoint.share import Share
from lightning_3d.torch_internals.dtensor import placed
from lightning_3d.torch_internals.pytree import tree_map

_Tree = TypeVar("_Tree")


class Staging:
    """Memory for one copy of nested containers at a time, that is used again for the next."""

    def __init__(self) -> None:
        self._free: defaultdict[Any, list[Tensor]] = defaultdict(list)
        self._used: list[Tensor] = []

    @torch.no_grad()
    def copied(self, tree: _Tree) -> _Tree:
        """Copies of the tensors on the CPU, and of everything else; the copy before must not be needed any more.

        A tensor in several places has one copy.
        """
        for tensor in self._used:
            self._free[_kind(tensor)].append(tensor)
        self._used = []
        copies: dict[int, Tensor] = {}

        def copied(leaf: Any) -> Any:
            if isinstance(leaf, Share):
                return replace(leaf, tensor=copied(leaf.tensor))
            if not isinstance(leaf, Tensor):
                return deepcopy(leaf)
            if id(leaf) not in copies:
                copies[id(leaf)] = self._on_host(leaf.detach())
            return copies[id(leaf)]

        found: _Tree = tree_map(copied, tree)
        self._free.clear()  # of what is saved no more
        return found

    def _on_host(self, tensor: Tensor) -> Tensor:
        if isinstance(tensor, DTensor):
            local = self._on_host(tensor.to_local())
            return placed(local, tensor.device_mesh, tensor.placements, tensor.shape, tensor.stride())
        free = self._free[_kind(tensor)]
        is_pinned = tensor.device.type == "cuda"
        copy = free.pop() if free else torch.empty_like(tensor, device="cpu", pin_memory=is_pinned)
        self._used.append(copy)
        return copy.copy_(tensor)


def _kind(tensor: Tensor) -> Any:
    return tensor.shape, tensor.stride(), tensor.dtype
