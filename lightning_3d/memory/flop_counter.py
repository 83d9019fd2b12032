"""Counting the floating-point operations of a step while it runs, by torch's formulas."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils.flop_counter import FlopCounterMode

from lightning_3d.memory.block_cost import FORMULAS
from lightning_3d.torch_internals.autograd import is_in_backward
from lightning_3d.torch_internals.dispatch import OperatorMode
from lightning_3d.torch_internals.fake_tensors import FakeTensor
from lightning_3d.torch_internals.pytree import tree_leaves


class FlopCounter(OperatorMode):
    """Counts products of matrices, convolutions and attention on this rank, as torch's ``FlopCounterMode`` does.

    That one hooks every module to name what it counts, and stages would take its hooks for the model's own.
    """

    def __init__(self) -> None:
        super().__init__()
        self.flops = 0
        """Operations of forwards and backwards; recomputation adds none."""
        self.is_on = True
        self._formulas = FlopCounterMode(display=False, custom_mapping=FORMULAS).flop_registry

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if any(issubclass(cls, DTensor) for cls in types):
            return NotImplemented  # it calls the operator on its shards, which comes here
        result = func(*args, **(kwargs or {}))
        formula = self._formulas.get(getattr(func, "overloadpacket", func))
        # In a backward autograd is on only while a forward is computed again.
        is_again = is_in_backward() and torch.is_grad_enabled()
        if formula is not None and self.is_on and not is_again and not _is_without_data(args):
            self.flops += formula(*args, **(kwargs or {}), out_val=result)
        return result


def _is_without_data(args: tuple[Any, ...]) -> bool:
    tensors = [leaf for leaf in tree_leaves(args) if isinstance(leaf, Tensor)]
    return any(isinstance(tensor, FakeTensor) or tensor.is_meta for tensor in tensors)
