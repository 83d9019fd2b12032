"""Parameters and gradients of a window where its optimizer steps them: in host memory.

From an accelerator they are copied to pinned memory while the window before them is stepped, and parameters copied back
while the next one is, with one wait per window. There is one buffer for either:

    side stream    to host 0 | to host 1        | back 0, to host 2 | back 1, ...
    host                     | step 0           | step 1            | step 2
    buffer         first     | second           | first             | second
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_3d.zero.offload.windows import Part

_ALIGNMENT = 64  # bytes


@dataclass(frozen=True, kw_only=True)
class Lent:
    """A window in host memory; parameters and gradients may still be on their way."""

    parts: Sequence[Part]
    values: Sequence[Tensor]
    """Stepped by the optimizer, for each part."""
    gradients: Sequence[Tensor]
    rounded: Mapping[Part, Tensor]
    """Values in 16 bits as they are, of parts whose values are their master weights."""
    arrival: torch.Event | None

    def wait(self) -> None:
        """Wait for what is on its way."""
        if self.arrival is not None:
            self.arrival.synchronize()


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

    def fetch(self, parts: Sequence[Part]) -> Lent:
        """Begin to copy a window; the one before the last must have been given back."""
        sources = [*(part.values.detach() for part in parts), *(part.gradient for part in parts)]
        rounded = {part: part.rounded for part in parts if part.rounded is not None}
        sources += rounded.values()
        away = [source for source in sources if not _is_on_host(source)]
        copies, arrival = self._room(away), None
        if self._stream is not None and away:
            with self._stream:
                for copy, source in zip(copies, away, strict=True):
                    copy.copy_(source, non_blocking=True)
            arrival = self._stream.record_event()
        here = [source if _is_on_host(source) else copies.pop(0) for source in sources]
        values, gradients, halves = here[: len(parts)], here[len(parts) : 2 * len(parts)], here[2 * len(parts) :]
        rounded = dict(zip(rounded, halves, strict=True))
        return Lent(parts=parts, values=values, gradients=gradients, rounded=rounded, arrival=arrival)

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
        """Round what was stepped, and begin to copy it back to where it lies."""
        for part, values in zip(lent.parts, lent.values, strict=True):
            self._send(values, part.values.detach())
            if part.rounded is not None:
                self._send(lent.rounded[part].copy_(values), part.rounded)

    def _send(self, tensor: Tensor, home: Tensor) -> None:
        if self._stream is not None and not _is_on_host(home):
            with self._stream:
                home.copy_(tensor, non_blocking=True)

    def finish(self) -> None:
        """After the last window of a step: what follows on the device sees the parameters that were given back."""
        if self._stream is not None:
            torch.accelerator.current_stream(self._device).wait_stream(self._stream)


def _is_on_host(tensor: Tensor) -> bool:
    return tensor.device.type == "cpu"


def _pinned(num_bytes: int) -> Tensor:
    return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
