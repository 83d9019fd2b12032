"""A sequence gathered for column weights, which the backward gathers again rather than keep it."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from lightning_3d.tensor.rules.sequence import SEQUENCE_DIM
from lightning_3d.tensor.run import crossing


class GatheredSequence:
    """An activation that column weights read.

    Args:
        local: This rank's slice, (B, T / size, D).
        mesh: The tp axis.
    """

    def __init__(self, local: Tensor, mesh: DeviceMesh) -> None:
        kind = local.device.type
        if torch.is_autocast_enabled(kind):  # as linear would with the whole; so less is sent, and linear keeps no copy
            local = local.to(torch.get_autocast_dtype(kind))
        self.whole = crossing.gather_sequence(local, mesh, SEQUENCE_DIM)
        """(B, T, D)."""
        self._local, self._mesh = local.detach(), mesh
        self._pointer = self.whole.data_ptr()
        self._again: Tensor | None = None
        self._num_saved = 0

    def not_saved(self) -> AbstractContextManager[Any]:
        """Calls made inside keep the slice for their backward in place of the whole."""
        return torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack)

    def _pack(self, saved: Tensor) -> Any:
        if saved.data_ptr() != self._pointer or saved.numel() != self.whole.numel():
            return saved
        self._num_saved += 1
        return saved.shape

    def _unpack(self, packed: Any) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        if self._again is None:
            self._again = crossing.gather(crossing.as_sharded(self._local, self._mesh, SEQUENCE_DIM))
        again = self._again.view(packed)
        self._num_saved -= 1
        if self._num_saved == 0:  # all that read it have run their backward
            self._again = None
        return again
