"""Running statistics of batch normalisation on own channels: every rank updates its own; all get all in the end.

They are plain buffers that are equal on all ranks between forwards, as checkpoints and evaluation expect. One
all-gather at the end of a block's forward makes them so.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType

import torch
from torch import Tensor

from lightning_3d.sharding.axis import Axis
from lightning_3d.sharding.placement import Shard
from lightning_3d.torch_internals.autograd import StopRecomputation


class RunningStatistics:
    """Around one forward of one block.

    Args:
        axis: The axis that the channels are sharded over.
    """

    def __init__(self, axis: Axis) -> None:
        self._axis = axis
        self._changed: dict[int, Tensor] = {}

    def own(self, buffer: Tensor, *, changes: bool) -> Tensor:
        """A view of the own channels.

        Args:
            buffer: One element per channel, of all channels.
            changes: Whether the own channels are about to be changed.
        """
        if changes:
            self._changed[id(buffer)] = buffer
        # `data`: autograd, which saves these without reading them, must not notice when they are completed.
        return Shard(0).own(buffer.data, self._axis.size, self._axis.rank)

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
        every = self._axis.all_gather(own, Shard(0))
        lengths = [buffer.shape[0] // self._axis.size for buffer in buffers]
        for buffer, values in zip(buffers, every.view(self._axis.size, -1).split(lengths, 1), strict=True):
            buffer.data.copy_(values.flatten())
