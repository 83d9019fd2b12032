"""A sequence gathered for column weights, which the backward gathers again rather than keep it."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from lightning_3d.tensor import collectives
from lightning_3d.tensor.axis import Axis
from lightning_3d.tensor.rules.sequence import SEQUENCE_DIM
from lightning_3d.torch_internals.tensors import storage_id


class GatheredSequence:
    """An activation that column weights read.

    Args:
        local: This rank's slice, (B, T / size, D).
        axis: The axis that the sequence is cut over.
    """

    def __init__(self, local: Tensor, axis: Axis) -> None:
        kind = local.device.type
        if torch.is_autocast_enabled(kind):  # as linear would with the whole; so less is sent, and linear keeps no copy
            local = local.to(torch.get_autocast_dtype(kind))
        self.whole = collectives.gather_sequence(local, axis, SEQUENCE_DIM)
        """(B, T, D)."""
        self._local, self._axis = local.detach(), axis
        self._storage = storage_id(self.whole.untyped_storage())
        self._again: Tensor | None = None
        self._num_saved, self._is_expected = 0, False

    def not_saved(self) -> AbstractContextManager[Any]:
        """Calls made inside keep the slice for their backward in place of the whole."""
        return torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack)

    def _pack(self, saved: Tensor) -> Any:
        if storage_id(saved.untyped_storage()) != self._storage or saved.numel() != self.whole.numel():
            return saved
        self._num_saved += 1
        if not self._is_expected and self.whole.requires_grad:
            self._is_expected = True
            self._axis.expect_backward(self.whole, "all-gather", self.whole)
        return saved.shape

    def _unpack(self, packed: Any) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        if self._again is None:
            self._again = self._axis.all_gather(self._local, SEQUENCE_DIM)
        again = self._again.view(packed)
        self._num_saved -= 1
        if self._num_saved == 0:  # all that read it have run their backward
            self._again = None
        return again
