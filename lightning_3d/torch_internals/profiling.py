"""Torch's profiler: names in its profiles; and by its events memory of the CPU as torch's allocator hands it out."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch.autograd import profiler
from torch.profiler import ProfilerActivity, profile, record_function


def named(name: str, *further: object) -> AbstractContextManager[Any]:
    """Name the code inside, by this and what follows it, in torch's profile, if one is made."""
    if not profiler._is_profiler_enabled:
        return nullcontext()
    return record_function(" ".join(map(str, (name, *further))))


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
