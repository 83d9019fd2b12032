"""Following placements through the aten ops of a call, by DTensor's rules.

A dim in parts (`placement`) is sharded evenly, but in another order. So ops that keep its elements apart (pointwise
ones, reductions and products over other dims) are as local as elsewhere; those that read positions along it are not.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import Partial, Replicate
from torch.distributed.tensor import Placement as DTensorPlacement
from torch.distributed.tensor import Shard as DTensorShard

from lightning_3d.torch_internals.dispatch import (
    FUSED_RMS_NORM,
    LOG_SOFTMAX,
    RESHAPE_ALIAS,
    SOFTMAX,
    TO_COPY,
    UNSAFE_VIEW,
    OperatorMode,
    OpOverload,
)
from lightning_3d.torch_internals.dtensor import NoRule, ShardingRules, StridedShard
from lightning_3d.torch_internals.pytree import tree_leaves

_aten = torch.ops.aten

_KEEP_APART = frozenset(
    {
        *(_aten.clone, _aten.detach, _aten.alias, _aten.permute, _aten.transpose, _aten.t, _aten.unsqueeze),
        *(_aten.squeeze, _aten.expand, _aten.slice, _aten.select, _aten.cat, _aten.stack, _aten.cumsum, _aten.sum),
        *(_aten.mean, _aten.amax, _aten.amin, _aten.mm, _aten.bmm, _aten.baddbmm, _aten.addmm, _aten.gather),
        *(_aten.index_select, _aten.masked_fill_, _aten.native_layer_norm, _aten.var_mean, _aten.where, _aten.fill_),
        _aten.copy_,
        *(op.overloadpacket for op in (TO_COPY, SOFTMAX, LOG_SOFTMAX, FUSED_RMS_NORM)),
    }
)
"""Besides pointwise ops those that treat the elements of a dim alike wherever DTensor lets it be sharded."""

_VIEWS = frozenset({_aten.view, UNSAFE_VIEW.overloadpacket, _aten.reshape, RESHAPE_ALIAS.overloadpacket})


class WatchedOps(OperatorMode):
    """Follows placements through the aten ops of a call; raises `NoRule` at the first that is not local.

    Args:
        rules: DTensor's.
        operands: The full fake arguments, and the dim that each is sharded on.
        size: Length of the axis.
        has_parts: Whether these dims have parts.
    """

    def __init__(
        self, rules: ShardingRules, operands: Sequence[tuple[Tensor, int | None]], size: int, *, has_parts: bool
    ) -> None:
        super().__init__()
        self._rules, self._size, self._has_parts = rules, size, has_parts
        self._kept: list[Tensor] = [tensor for tensor, _ in operands]  # so that no id is used twice
        self._dims = {id(tensor): dim for tensor, dim in operands if dim is not None}
        self._strided: dict[int, DTensorPlacement] = {}
        self._sums: dict[int, str] = {}  # parts of which lie on the ranks: "sum" or "avg"
        self._cuts: dict[int, set[int | None]] = {id(tensor): set() for tensor, dim in operands if dim is None}

    def dim(self, leaf: object) -> int | None:
        """The sharded dim of a result; None for a sum."""
        dim = self._dims.get(id(leaf))
        if dim is None and id(leaf) not in self._sums:
            raise NoRule(f"the result {leaf} is not sharded")
        return dim

    def is_mean(self, leaves: Sequence[object]) -> bool:
        """Whether results are means of what the ranks have."""
        kinds = {self._sums.get(id(leaf)) for leaf in leaves}
        if len(kinds) > 1:
            raise NoRule("sums beside means or shards")
        return kinds == {"avg"}

    def cut(self, operand: Tensor) -> int | None:
        """The dim along which an operand is cut."""
        cuts = self._cuts.get(id(operand), set())
        if len(cuts) > 1:
            raise NoRule("a replicated operand is used whole and cut")
        return next(iter(cuts), None)

    def __torch_dispatch__(
        self, func: OpOverload, types: object, args: tuple[object, ...] = (), kwargs: dict[str, object] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        if func.namespace == "prim":
            return func(*args, **kwargs)
        moved: dict[int, int] = {}
        placements: Sequence[DTensorPlacement | None] = ()
        if any(id(tensor) in self._sums for tensor in tensors):
            return self._view_of_sum(func, tensors, args, kwargs)
        if any(id(tensor) in self._dims or id(tensor) in self._strided for tensor in tensors):
            propagation = self._rules.propagate(func, args, kwargs, self._placement)
            moved = {id(move.tensor): self._cut_of(move.tensor, move.target) for move in propagation.moves}
            placements = propagation.outputs
        for tensor in tensors:
            if id(tensor) in self._cuts:
                self._cuts[id(tensor)].add(moved.get(id(tensor)))
        output = func(*args, **kwargs)
        leaves = tree_leaves(output)
        if not tensors and any(isinstance(leaf, Tensor) and leaf.dim() for leaf in leaves):
            raise NoRule(f"{func} makes a tensor that may depend on sizes")
        for leaf, placement in zip(leaves, placements, strict=bool(placements)):
            if isinstance(leaf, Tensor):
                self._enter(leaf, placement, func)
        if placements and self._has_parts:
            self._check_order(func, tensors, leaves)
        return output

    def _view_of_sum(self, func: OpOverload, tensors: Sequence[Tensor], args: Any, kwargs: Any) -> Any:
        if func.overloadpacket not in _VIEWS or len(tensors) > 1:
            raise NoRule(f"{func} reads a sum that is not made yet")
        output = func(*args, **kwargs)
        self._kept.append(output)
        self._sums[id(output)] = self._sums[id(tensors[0])]
        return output

    def _placement(self, tensor: Tensor) -> DTensorPlacement:
        if id(tensor) in self._strided:
            return self._strided[id(tensor)]
        dim = self._dims.get(id(tensor))
        return Replicate() if dim is None else DTensorShard(dim)

    def _cut_of(self, tensor: Tensor, target: DTensorPlacement) -> int:
        if id(tensor) not in self._cuts or type(target) is not DTensorShard:
            raise NoRule("an operand needs communication")
        if tensor.shape[target.dim] % self._size:
            raise NoRule("an operand can't be cut evenly")
        return target.dim

    def _enter(self, tensor: Tensor, placement: DTensorPlacement | None, func: OpOverload) -> None:
        self._kept.append(tensor)
        # DTensor has "avg" also for a loss that divides by the weights of its rows, of which ranks have unequal ones.
        sums = ("sum", "avg") if func.overloadpacket is _aten.mean else ("sum",)
        if type(placement) is Partial and placement.reduce_op in sums and tensor.is_floating_point():
            self._sums[id(tensor)] = placement.reduce_op
        elif type(placement) is DTensorShard and tensor.shape[placement.dim] % self._size == 0:
            self._dims[id(tensor)] = placement.dim
        elif isinstance(placement, StridedShard):  # a sharded dim was flattened into one before it, for now
            self._strided[id(tensor)] = placement
        else:
            raise NoRule(f"a result is {placement}")

    def _check_order(self, func: OpOverload, tensors: Sequence[Tensor], results: Sequence[Any]) -> None:
        """Refuse ops that read positions along a dim with parts."""
        if torch.Tag.pointwise in func.tags or func.overloadpacket in _KEEP_APART:
            return
        before = {_place(tensor.shape, self._dims[id(tensor)]) for tensor in tensors if id(tensor) in self._dims}
        after = {_place(leaf.shape, self._dims[id(leaf)]) for leaf in results if id(leaf) in self._dims}
        if func.overloadpacket not in _VIEWS or before != after:
            raise NoRule(f"{func} may read positions along a dim in parts")


def _place(shape: Sequence[int], dim: int) -> tuple[int, int]:
    """Numbers that a view keeps for a dim that it leaves alone."""
    return math.prod(shape[:dim]), shape[dim]
