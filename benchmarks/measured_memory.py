"""The peak of a rank's memory in the second step, as torch's allocator hands it out."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator
from typing import Any

import lightning as L
import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile, record_function

from lightning_3d import ThreeDStrategy
from lightning_3d.torch_internals.modules import named_state
from lightning_3d.torch_internals.pytree import tree_leaves
from lightning_3d.zero.shard import plain

_MARK = "lightning_3d: the step whose memory is measured"


class AllocatedPeak:
    """The most bytes that were allocated at once between `mark` and `stop`, above those at `start`.

    What was there at `start` should still be there at `stop`: the profiler does not see it freed. Nor does it see what
    the threads of collectives free, which counts until its addresses are used again.
    """

    def __init__(self) -> None:
        self._profile = profile(activities=[ProfilerActivity.CPU], profile_memory=True)

    def start(self) -> None:
        """Begin to follow; no other profiler of torch may run until `stop`."""
        self._profile.start()

    def mark(self) -> None:
        """Begin to look for the peak."""
        with record_function(_MARK):
            pass

    def stop(self) -> int:
        """End; returns bytes."""
        self._profile.stop()
        profiler: Any = self._profile.profiler
        events = sorted(_all(profiler.kineto_results.experimental_event_tree()), key=lambda event: event.start_time_ns)
        blocks, peak = _Blocks(), 0
        for event in events:
            if event.name == _MARK:
                peak = blocks.num_bytes
            elif event.name == "[memory]":
                blocks.change(event.extra_fields.ptr, event.extra_fields.alloc_size)
                peak = max(peak, blocks.num_bytes)
        return peak


def _all(events: Iterable[Any]) -> Iterator[Any]:
    for event in events:
        yield event
        yield from _all(event.children)


class _Blocks:
    """Allocated memory by address."""

    def __init__(self) -> None:
        self._sizes: dict[int, int] = {}
        self._addresses: list[int] = []  # ascending
        self.num_bytes = 0

    def change(self, address: int, num_bytes: int) -> None:
        """Allocate; free if the number is negative."""
        if num_bytes < 0:
            if address in self._sizes:
                self._remove(bisect_left(self._addresses, address))
            return
        first = bisect_left(self._addresses, address)
        if first > 0 and self._end(first - 1) > address:
            first -= 1
        while first < len(self._addresses) and self._addresses[first] < address + num_bytes:
            self._remove(first)
        insort(self._addresses, address)
        self._sizes[address] = num_bytes
        self.num_bytes += num_bytes

    def _end(self, index: int) -> int:
        return self._addresses[index] + self._sizes[self._addresses[index]]

    def _remove(self, index: int) -> None:
        self.num_bytes -= self._sizes.pop(self._addresses.pop(index))


class MeasuredPeak(L.Callback):
    """Measures the second step, as optimizers make their states in the first.

    The allocator of the CPU does not count: there torch's profiler follows the first two steps.
    """

    peak = 0
    """Bytes; 0 before the second step has ended."""

    def on_train_batch_start(self, trainer: L.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Begin to measure."""
        self._device: torch.device = trainer.strategy.root_device
        if batch_idx == 0 and self._device.type == "cpu":
            self._at_start, self._allocated = _bytes_now(pl_module, trainer.optimizers), AllocatedPeak()
            self._allocated.start()
        if batch_idx == 1 and self._device.type == "cpu":
            self._allocated.mark()
        elif batch_idx == 1:
            torch.accelerator.reset_peak_memory_stats(self._device)

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Note the peak."""
        if batch_idx == 1:
            assert isinstance(trainer.strategy, ThreeDStrategy)
            trainer.strategy.run.parallel.settle()  # the profiler can crash if it ends while a collective runs
            if self._device.type == "cpu":
                self.peak = self._at_start + self._allocated.stop()
            else:
                self.peak = int(torch.accelerator.max_memory_allocated(self._device))


def _bytes_now(module: L.LightningModule, optimizers: Iterable[torch.optim.Optimizer]) -> int:
    """Bytes of weights, gradients and optimizer states that are on this rank now."""
    tensors: list[Any] = [tensor for _, tensor, _ in named_state(module) if not tensor.is_meta]
    tensors += [tensor.grad for tensor in tensors if tensor.is_leaf]
    tensors += [leaf for optimizer in optimizers for state in optimizer.state.values() for leaf in tree_leaves(state)]
    held = [plain(tensor) for tensor in tensors if isinstance(tensor, Tensor)]
    return sum({tensor.data_ptr(): tensor.nbytes for tensor in held if tensor.numel()}.values())
