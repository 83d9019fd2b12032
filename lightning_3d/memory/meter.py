"""The peak of this rank's memory in its second step, beside which the plan shows what was predicted."""

from __future__ import annotations

from collections.abc import Callable

import torch

from lightning_3d.torch_internals.profiling import AllocatedPeak


class MemoryMeter:
    """Measures one optimizer step: the second, as optimizers make their states in the first.

    The allocator of the CPU does not count: there it is measured only if asked for, as torch's profiler follows both.

    Args:
        num_batches: Batches of an optimizer step.
        held: Gives the bytes of tensors before the first step, which the allocator of the CPU does not tell.
        settle: Waits for what a step still communicates: torch's profiler can crash if it ends while a collective runs.
        done: Takes the peak; None if it could not be measured. Every rank calls it after the same step.
    """

    def __init__(
        self,
        device: torch.device,
        num_batches: int,
        held: Callable[[], int],
        settle: Callable[[], None],
        done: Callable[[int | None], None],
    ) -> None:
        self._device, self._num_batches, self._held, self._settle, self._done = device, num_batches, held, settle, done
        self._num_begun, self._at_start = 0, 0
        self._peak: AllocatedPeak | None = None
        self._is_measuring = False
        self.profiles = False
        """Whether to measure by torch's profiler where the allocator does not count."""

    def begin_batch(self) -> None:
        """Before a training step."""
        if self._num_begun == 0 and self._device.type == "cpu" and self.profiles:
            self._follow()
        if self._num_begun == self._num_batches:
            self._begin()
        if self._num_begun == 2 * self._num_batches:
            self.end()
        self._num_begun += 1

    def _follow(self) -> None:
        self._at_start, self._peak = self._held(), AllocatedPeak()
        self._peak.start()

    def _begin(self) -> None:
        self._is_measuring = True
        if self._device.type != "cpu":
            torch.accelerator.reset_peak_memory_stats(self._device)
        elif self._peak is not None:
            self._peak.mark()

    def end(self) -> None:
        """After the step, before anything else runs."""
        if not self._is_measuring:
            return
        self._is_measuring = False
        self._done(self._measured())

    def stop(self) -> None:
        """At the end of a run, also of one with too few steps."""
        if self._peak is not None:
            self._peak.stop()
            self._peak = None

    def _measured(self) -> int | None:
        if self._device.type != "cpu":
            return int(torch.accelerator.max_memory_allocated(self._device))
        if self._peak is None:
            return None
        self._settle()
        peak, self._peak = self._peak, None
        return self._at_start + peak.stop()
