"""Collectives of the tp group in two ways: in place where a block runs, as functions where it is captured (`capture`).

Tracing needs collectives that return new tensors, which `functional_collectives` has; those in place
are the faster ones of an eager run.
"""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor

from lightning_3d.torch_internals import functional_collectives as functional
from lightning_3d.torch_internals.fake_tensors import FunctionalTensor


def all_reduced(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The sum over the ranks of a group; a contiguous `tensor` that nobody else reads, as it may be overwritten."""
    if _is_captured(tensor):
        summed: Tensor = functional.all_reduce(tensor, "sum", group)
        return summed
    dist.all_reduce(tensor, group=group)
    return tensor


def all_gathered(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    """What all ranks of a group have, one after the other along dim 0; `tensor` is contiguous."""
    if _is_captured(tensor):
        every: Tensor = functional.all_gather_single(tensor, 0, group)
        return every
    gathered = tensor.new_empty(dist.get_world_size(group) * tensor.shape[0], *tensor.shape[1:])
    dist.all_gather_single(gathered, tensor, group=group)
    return gathered


def _is_captured(tensor: Tensor) -> bool:
    """Whether a tensor is a stand-in; AOTAutograd traces on these (torch 2.13)."""
    return isinstance(tensor, FunctionalTensor)
