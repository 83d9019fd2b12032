"""Cutting a sequence of block calls into consecutive stages: the slowest as light as possible, then the fewest bytes.

Pure and exact: numbers in, stages out. What the numbers are is decided in ``loads``.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Protocol


class StageLoad(Protocol):
    """The cost to a stage of holding some consecutive calls."""

    def __call__(self, stage: int, start: int, stop: int) -> int:
        """Load of the calls ``start`` to ``stop - 1`` on ``stage``; never less for a longer range of calls."""


def additive(loads: Sequence[int]) -> StageLoad:
    """The sum of the calls' loads, whatever the stage."""
    prefix = [0, *accumulate(loads)]
    return lambda stage, start, stop: prefix[stop] - prefix[start]


def partition(load: StageLoad, boundary_bytes: Sequence[int], num_stages: int) -> list[int]:
    """Cut calls into ``num_stages`` consecutive, non-empty parts.

    Exact, in this order: the greatest load of a stage is as small as possible; the bytes over all boundaries are as few
    as possible; the sum of the squared loads is as small as possible. Dynamic programming over prefixes, in which no
    part grows beyond the best greatest load: about n^2 evaluations of ``load`` for n calls.

    Args:
        load: The load of a stage.
        boundary_bytes: Bytes that cross between each call and the next, one number less than there are calls.
        num_stages: Number of parts, at most the number of calls.

    Returns:
        Stage of each call, ascending.
    """
    num_calls = len(boundary_bytes) + 1
    assert 1 <= num_stages <= num_calls, f"{num_calls} calls can't fill {num_stages} stages"
    limit = least_greatest_load(load, num_calls, num_stages)
    # (bytes, squares) of the best cut of the first `stop` calls into the stages so far; lexicographic order is additive
    best: dict[int, tuple[int, int]] = {0: (0, 0)}
    cuts: list[dict[int, int]] = []
    for stage in range(num_stages):
        following: dict[int, tuple[int, int]] = {}
        cut: dict[int, int] = {}
        for stop in _stops(stage, num_calls, num_stages):
            for start in _starts(stage, stop):
                own = load(stage, start, stop)
                if own > limit:
                    break
                if start not in best:
                    continue
                crossing = boundary_bytes[start - 1] if start else 0
                cost = (best[start][0] + crossing, best[start][1] + own * own)
                if stop not in following or cost < following[stop]:
                    following[stop], cut[stop] = cost, start
        best = following
        cuts.append(cut)
    stages: list[int] = []
    stop = num_calls
    for stage in reversed(range(num_stages)):
        start = cuts[stage][stop]
        stages[:0] = [stage] * (stop - start)
        stop = start
    return stages


def least_greatest_load(load: StageLoad, num_calls: int, num_stages: int) -> int:
    """The greatest load of a stage under the best cut into non-empty parts."""
    best = {0: 0}
    for stage in range(num_stages):
        following: dict[int, int] = {}
        for stop in _stops(stage, num_calls, num_stages):
            for start in _starts(stage, stop):
                own = load(stage, start, stop)
                if stop in following and own >= following[stop]:
                    break  # and so for all that start earlier
                following[stop] = min(following.get(stop, max(best[start], own)), max(best[start], own))
        best = following
    return best[num_calls]


def _stops(stage: int, num_calls: int, num_stages: int) -> range:
    """Where a stage can end: each stage before it and after it needs a call."""
    if stage == num_stages - 1:
        return range(num_calls, num_calls + 1)
    return range(stage + 1, num_calls - (num_stages - stage - 1) + 1)


def _starts(stage: int, stop: int) -> range:
    """Where a stage that ends there can start, the latest first."""
    return range(0, -1, -1) if stage == 0 else range(stop - 1, stage - 1, -1)
