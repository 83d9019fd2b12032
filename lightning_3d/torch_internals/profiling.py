"""Memory of the CPU as torch's allocator hands it out, by the events of its profiler."""

from __future__ import annotations

from typing import Any

from torch.profiler import ProfilerActivity, profile, record_function

_MARK = "lightning_3d: the step whose memory is measured"


class AllocatedPeak:
    """The most bytes that were allocated at once between `mark` and `stop`, above those at `start`.

    What was there at `start` should still be there at `stop`: the profiler does not see it freed.
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
        events = [event for event in profiler.kineto_results.events() if event.name() in ("[memory]", _MARK)]
        total, peak = 0, 0
        for event in sorted(events, key=lambda event: event.start_ns()):
            if event.name() == _MARK:
                peak = total
            else:
                total += event.nbytes()
                peak = max(peak, total)
        return peak
