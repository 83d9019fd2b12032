"""Copies between the device and pinned host memory, on streams beside the one that computes.

They are ordered by events: a copy begins when what was computed before is done, and `Wait` lets what is computed
afterwards begin when the copy is done. The memory of both ends is not let go before, so that no allocator
hands it out while it is read or written.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from lightning_3d.errors import OffloadError

Wait = Callable[[], Tensor]
"""Gives a copy that was begun. What is computed from then on comes after it."""


class SideStreams:
    """A stream for each direction, as both run at once.

    Args:
        device: An accelerator.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._leaving, self._coming = torch.Stream(device), torch.Stream(device)

    def to_host(self, tensor: Tensor) -> Wait:
        """Begin to copy a tensor of the device.

        Raises:
            OffloadError: the host has no room for it.
        """
        try:
            host = torch.empty_like(tensor, device="cpu", pin_memory=True)
        except RuntimeError as error:
            raise OffloadError(
                f"The host has no room for {tensor.nbytes:,} further bytes in pinned memory, to which"
                " activations.offload=True moves what blocks keep. Offload fewer blocks (activations.blocks,"
                " activations.every), or less of them (activations.recompute='full')."
            ) from error
        return _StreamCopy(tensor, host, self._leaving, self._device)

    def to_device(self, tensor: Tensor) -> Wait:
        """Begin to copy a tensor of the host back."""
        return _StreamCopy(tensor, torch.empty_like(tensor, device=self._device), self._coming, self._device)


class _StreamCopy:
    """A copy on a stream of its own."""

    def __init__(self, source: Tensor, target: Tensor, stream: torch.Stream, device: torch.device) -> None:
        self._ends, self._device = (source, target), device
        self._computing = torch.accelerator.current_stream(device)
        stream.wait_stream(self._computing)
        with stream:
            target.copy_(source, non_blocking=True)
        self._done = stream.record_event()

    def __call__(self) -> Tensor:
        torch.accelerator.current_stream(self._device).wait_event(self._done)
        return self._ends[1]

    def __del__(self) -> None:
        """Let the stream from which the memory of the ends came use it again after the copy."""
        self._computing.wait_event(self._done)
