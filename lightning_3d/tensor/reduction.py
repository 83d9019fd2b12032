"""Summing over tp, in two ways: in place where a block runs, as a function where it is captured to be compiled.

Tracing needs a collective whose result is a new tensor, as `torch.distributed._functional_collectives` has them; each
costs an eager run some 30 us more than the call in place.
"""

from __future__ import annotations

import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import Tensor
from torch._subclasses.functional_tensor import FunctionalTensor


def is_captured(tensor: Tensor) -> bool:
    """Whether a tensor stands for one of a compiled block's (`capture`)."""
    return isinstance(tensor, FunctionalTensor)


def all_reduced(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The sum over the ranks of a group; a contiguous `tensor` that nobody else reads, as it may be overwritten."""
    if is_captured(tensor):
        summed: Tensor = functional.all_reduce(tensor, "sum", group)
        return summed
    dist.all_reduce(tensor, group=group)
    return tensor
