"""Parameters and gradients of a window where its optimizer steps them: in host memory.

From an accelerator they are copied to pinned memory while the window before them is stepped, and parameters copied back
while the next one is. There is one buffer for either:

    side stream    to host 0 | to host 1        | back 0, to host 2 | back 1, ...
    host                     | step 0           | step 1            | step 2
    buffer         first     | second           | first             | second
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_3d.zero.offload.windows import Piece

_ALIGNMENT = 64  # bytes


@dataclass(frozen=True, kw_only=True)
class Lent:
    """A window in host memory; parameters and gradients may still be on their way."""

    pieces: Sequence[Piece]
    values: Sequence[Tensor]
    """Stepped by the optimizer, for each piece."""
    gradients: Sequence[Tensor]
    arrival: torch.Event | None
    """Waits for what is on its way."""


class HostCopies:
    """Lends windows in host memory. What lies there is lent itself.

    Args:
        device: The strategy's.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = None if device.type == "cpu" else torch.Stream(device=device)
        self._device = device
        self._buffers = [torch.empty(0, dtype=torch.uint8)] * 2

    def begin(self) -> None:
        """Before the first window of a step: gradients and parameters are ready from here on."""
        if self._stream is not None:
            self._stream.wait_stream(torch.accelerator.current_stream(self._device))

    def fetch(self, pieces: Sequence[Piece]) -> Lent:
        """Begin to copy a window; the one before the last must have been given back."""
        sources = [*(piece.values for piece in pieces), *(piece.gradient for piece in pieces)]
        if self._stream is None or all(map(_is_on_host, sources)):
            values, gradients = sources[: len(pieces)], sources[len(pieces) :]
            return Lent(pieces=pieces, values=values, gradients=gradients, arrival=None)
        copies = self._room(sources)
        with self._stream:
            for copy, source in zip(copies, sources, strict=True):
                copy.copy_(source, non_blocking=True)
        values, gradients = copies[: len(pieces)], copies[len(pieces) :]
        return Lent(pieces=pieces, values=values, gradients=gradients, arrival=self._stream.record_event())

    def _room(self, sources: Sequence[Tensor]) -> list[Tensor]:
        """Pinned tensors like these, in the buffer whose turn it is."""
        sizes = [-(-source.nbytes // _ALIGNMENT) * _ALIGNMENT for source in sources]
        buffer = self._buffers.pop(0)
        if buffer.nbytes < sum(sizes):
            buffer = _pinned(sum(sizes))
        self._buffers.append(buffer)
        room = buffer[: sum(sizes)].split(sizes)
        pairs = zip(room, sources, strict=True)
        return [bytes_[: source.nbytes].view(source.dtype).view(source.shape) for bytes_, source in pairs]

    def give_back(self, lent: Lent) -> None:
        """Begin to copy what was stepped back to where it lies."""
        if lent.arrival is None or self._stream is None:
            return
        with self._stream:
            for piece, values in zip(lent.pieces, lent.values, strict=True):
                piece.values.copy_(values, non_blocking=True)

    def finish(self) -> None:
        """After the last window of a step: what follows on the device sees the parameters that were given back."""
        if self._stream is not None:
            torch.accelerator.current_stream(self._device).wait_stream(self._stream)


def _is_on_host(tensor: Tensor) -> bool:
    return tensor.device.type == "cpu"


def _pinned(num_bytes: int) -> Tensor:
    return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
