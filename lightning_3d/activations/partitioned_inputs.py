"""Inputs of recomputed blocks, kept in slices by the ranks that share a block's weights (Rajbhandari et al. 2020).

These ranks get the same inputs. Each keeps its slice, and they gather the whole before they compute the block again.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks


@dataclass(frozen=True, kw_only=True)
class _Slice:
    """This rank's part of a tensor."""

    part: Tensor
    shape: torch.Size


class PartitionedInputs:
    """Cuts what is saved into slices.

    Args:
        group: The tensor-parallel axis.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group, self._size, self._rank = group, dist.get_world_size(group), dist.get_rank(group)

    def kept(self) -> AbstractContextManager[None]:
        """Keep slices of the tensors that are saved inside: of those that carry gradients."""
        return saved_tensors_hooks(self._cut, self._whole)

    def _cut(self, tensor: Tensor) -> Tensor | _Slice:
        if not tensor.requires_grad or not tensor.is_contiguous() or tensor.numel() % self._size:
            return tensor
        part = tensor.detach().view(-1).chunk(self._size)[self._rank].clone()
        return _Slice(part=part, shape=tensor.shape)

    def _whole(self, kept: Tensor | _Slice) -> Tensor:
        if isinstance(kept, Tensor):
            return kept
        whole = kept.part.new_empty(self._size * kept.part.numel())
        dist.all_gather_single(whole, kept.part, group=self._group)
        return whole.view(kept.shape)
