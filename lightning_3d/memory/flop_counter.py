"""Counting the floating-point operations of a step while it runs, by torch's formulas."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils.flop_counter import FlopCounterMode

from lightning_3d.torch_internals.autograd import is_in_backward
from lightning_3d.torch_internals.dispatch import GROUPED_MM, SCALED_GROUPED_MM, Operator, OperatorMode
from lightning_3d.torch_internals.fake_tensors import FakeTensor
from lightning_3d.torch_internals.pytree import Args, Kwargs, tree_leaves


def _flops_of_grouped(input: Sequence[int], weight: Sequence[int], *_: object, **__: object) -> int:
    """Floating-point operations of a product per expert, [M, K] and [G, K, N]."""
    return 2 * math.prod(input) * weight[-1]


def _flops_of_added(into: Sequence[int], left: Sequence[int], right: Sequence[int], **_: object) -> int:
    """Floating-point operations of a product that is added in place."""
    return 2 * math.prod(left) * right[-1]


FORMULAS = {
    GROUPED_MM: _flops_of_grouped,
    SCALED_GROUPED_MM: _flops_of_grouped,
    torch.ops.aten.addmm_: _flops_of_added,
}
"""Formulas of products that torch's counter of operations does not know."""

_REGISTRY = FlopCounterMode(display=False, custom_mapping=FORMULAS).flop_registry


def flops_of(func: object, args: Args, kwargs: Mapping[str, object], result: object) -> int:
    """The floating-point operations of an operator that has run, by torch's formula for it.

    ``FlopCounterMode`` itself hooks every module to name what it counts, and stages would take its hooks for the
    model's own; it also hooks their results, which a shard of a tensor refuses.
    """
    formula = _REGISTRY.get(getattr(func, "overloadpacket", func))
    return 0 if formula is None else int(formula(*args, **kwargs, out_val=result))


class FlopCounter(OperatorMode):
    """Counts products of matrices, convolutions and attention on this rank, as torch's ``FlopCounterMode`` does."""

    def __init__(self) -> None:
        super().__init__()
        self.flops = 0
        """Operations of forwards and backwards; recomputation adds none."""
        self.is_on = True

    def __torch_dispatch__(
        self, func: Operator, types: Sequence[type], args: Args = (), kwargs: Kwargs | None = None
    ) -> object:
        if any(issubclass(cls, DTensor) for cls in types):
            return NotImplemented  # it calls the operator on its shards, which comes here
        result = func(*args, **(kwargs or {}))
        # In a backward autograd is on only while a forward is computed again.
        is_again = is_in_backward() and torch.is_grad_enabled()
        if self.is_on and not is_again and not _is_without_data(args):
            self.flops += flops_of(func, args, kwargs or {}, result)
        return result


def _is_without_data(args: tuple[object, ...]) -> bool:
    tensors = [leaf for leaf in tree_leaves(args) if isinstance(leaf, Tensor)]
    return any(isinstance(tensor, FakeTensor) or tensor.is_meta for tensor in tensors)
