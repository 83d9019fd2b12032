"""Inputs of recomputed blocks, kept in slices by the ranks that share a block's weights (Rajbhandari et al. 2020).

These ranks get the same inputs. Each keeps its slice, and they gather the whole before they compute the block again.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import AbstractContextManager
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from lightning_3d.activations.saved_tensor import Save, Saved, SavedTensor, unpack


def is_cut(shape: Sequence[int], num_ranks: int, *, requires_grad: bool) -> bool:
    """Whether a contiguous tensor of this shape is kept in slices: it carries gradients, and the slices are equal."""
    return requires_grad and math.prod(shape) % num_ranks == 0


class PartitionedInputs:
    """Cuts what is saved into slices.

    Args:
        group: The tensor-parallel axis.
        keep: Keeps the slices, and tensors that are not cut.
    """

    def __init__(self, group: dist.ProcessGroup, keep: Save = SavedTensor) -> None:
        self._group, self._size, self._rank = group, dist.get_world_size(group), dist.get_rank(group)
        self._keep = keep

    def saved(self) -> AbstractContextManager[None]:
        """Keep slices of the tensors that are saved inside: of those that carry gradients."""
        return saved_tensors_hooks(self._cut, unpack)

    def _cut(self, tensor: Tensor) -> Saved:
        if not tensor.is_contiguous() or not is_cut(tensor.shape, self._size, requires_grad=tensor.requires_grad):
            return self._keep(tensor)
        part = tensor.detach().view(-1).chunk(self._size)[self._rank].clone()
        return partial(self._whole, self._keep(part), tensor.shape)

    def _whole(self, saved: Saved, shape: torch.Size) -> Tensor:
        part = saved()
        whole = part.new_empty(self._size * part.numel())
        dist.all_gather_single(whole, part, group=self._group)
        return whole.view(shape)
