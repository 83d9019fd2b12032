"""Running statistics of batch normalisation on own channels: every rank updates its own; all get all in the end.

They are plain buffers that are equal on all ranks between forwards, as checkpoints and evaluation expect. One
all-gather at the end of a block's forward makes them so.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from lightning_3d.tensor.run.collectives import all_gathered
from lightning_3d.torch_internals.recompute import StopRecomputation


class RunningStatistics:
    """Around one forward of one block.

    Args:
        mesh: The tp axis.
    """

    def __init__(self, mesh: DeviceMesh) -> None:
        self._mesh = mesh
        self._changed: dict[int, Tensor] = {}

    def own(self, buffer: Tensor, *, changes: bool) -> Tensor:
        """A view of the own channels.

        Args:
            buffer: One element per channel, of all channels.
            changes: Whether the own channels are about to be changed.
        """
        if changes:
            self._changed[id(buffer)] = buffer
        length = buffer.shape[0] // self._mesh.size()
        # `data`: autograd, which saves these without reading them, must not notice when they are completed.
        return buffer.data.narrow(0, self._mesh.get_local_rank() * length, length)

    def __enter__(self) -> RunningStatistics:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._changed and (kind is None or issubclass(kind, StopRecomputation)):
            self._complete(list(self._changed.values()))
        self._changed.clear()

    def _complete(self, buffers: Sequence[Tensor]) -> None:
        own = torch.cat([self.own(buffer, changes=False) for buffer in buffers])
        every = all_gathered(own, self._mesh.get_group())
        lengths = [buffer.shape[0] // self._mesh.size() for buffer in buffers]
        for buffer, values in zip(buffers, every.view(self._mesh.size(), -1).split(lengths, 1), strict=True):
            buffer.data.copy_(values.flatten())
