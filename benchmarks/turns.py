"""Steps that take turns in one process, by its CPU time: what else runs on the machine counts little."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence


def take_turns(steps: Mapping[str, Callable[[], None]], *, num_warm_up: int, num_turns: int) -> dict[str, list[float]]:
    """CPU seconds of each step, by turn.

    Args:
        num_warm_up: Turns before those that count.
    """
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for turn in range(num_warm_up + num_turns):
        for name, step in steps.items():
            start = time.process_time()
            step()
            if turn >= num_warm_up:
                seconds[name].append(time.process_time() - start)
    return seconds


def ratio_quartiles(own: Sequence[float], peer: Sequence[float]) -> tuple[float, float, float]:
    """The quartiles of the ratios of two steps in the same turn; the second is the median."""
    low, middle, high = statistics.quantiles([mine / other for mine, other in zip(own, peer, strict=True)], n=4)
    return low, middle, high
