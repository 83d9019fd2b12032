"""Parameters and gradients of a window where its optimizer steps them: in host memory.

From an accelerator they are copied to pinned memory while the window before them is stepped, and parameters copied back
while the next one is, with one wait per window. torch's allocator hands the memory of a window out again once it is
copied back:

    side stream    to host 0 | to host 1        | back 0, to host 2 | back 1, ...
    host                     | step 0           | step 1            | step 2
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from lightning_3d.zero.offload.windows import Part


@dataclass(frozen=True, kw_only=True)
class Lent:
    """A window in host memory; parameters and gradients may still be on their way."""

    parts: Sequence[Part]
    on_host: Sequence[Part]
    """The same with tensors of the host, whose values the optimizer steps."""
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

    def begin(self) -> None:
        """Before the first window of a step: gradients and parameters are ready from here on."""
        if self._stream is not None:
            self._stream.wait_stream(torch.accelerator.current_stream(self._device))

    def fetch(self, parts: Sequence[Part]) -> Lent:
        """Begin to copy a window."""
        on_host = [
            replace(
                part,
                values=self._fetched(part.values.detach()),
                gradient=self._fetched(part.gradient),
                rounded=None if part.rounded is None else self._fetched(part.rounded),
            )
            for part in parts
        ]
        arrival = None if self._stream is None else self._stream.record_event()
        return Lent(parts=parts, on_host=on_host, arrival=arrival)

    def _fetched(self, tensor: Tensor) -> Tensor:
        if _is_on_host(tensor):
            return tensor
        return self._send(tensor, torch.empty_like(tensor, device="cpu", pin_memory=True))

    def give_back(self, lent: Lent) -> None:
        """Round what was stepped, and begin to copy it back to where it lies."""
        for part, stepped in zip(lent.parts, lent.on_host, strict=True):
            if not _is_on_host(part.values):
                self._send(stepped.values, part.values.detach())
            if part.rounded is not None and stepped.rounded is not None:
                stepped.rounded.copy_(stepped.values)
                if not _is_on_host(part.rounded):
                    self._send(stepped.rounded, part.rounded)

    def _send(self, tensor: Tensor, target: Tensor) -> Tensor:
        assert self._stream is not None
        with self._stream:
            return target.copy_(tensor, non_blocking=True)

    def finish(self) -> None:
        """After the last window of a step: what follows on the device sees the parameters that were given back."""
        if self._stream is not None:
            torch.accelerator.current_stream(self._device).wait_stream(self._stream)


def _is_on_host(tensor: Tensor) -> bool:
    return tensor.device.type == "cpu"
