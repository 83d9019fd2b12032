"""Cutting a sequence of loads into consecutive stages so that the heaviest is as light as possible."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate


def partition(loads: Sequence[int], num_stages: int) -> list[int]:
    """Cut ``loads`` into ``num_stages`` consecutive, non-empty parts that minimise the greatest sum.

    Exact, by dynamic programming over prefixes with binary search; O(stages x n x log n). Among cuts with the same
    greatest sum, earlier stages get fewer elements.

    Args:
        loads: Non-negative load of each element.
        num_stages: Number of parts, at most ``len(loads)``.

    Returns:
        Stage of each element, ascending.
    """
    n = len(loads)
    assert 1 <= num_stages <= n, f"{n} elements can't fill {num_stages} parts"
    prefix = [0, *accumulate(loads)]
    best = [0, *([prefix[-1] + 1] * n)]  # best[j]: least greatest sum of the first j elements in the parts so far
    cuts: list[list[int]] = []
    for part in range(num_stages):
        following = [prefix[-1] + 1] * (n + 1)
        cut = [0] * (n + 1)
        for j in range(part + 1, n - (num_stages - part - 1) + 1):
            following[j], cut[j] = min(_candidates(best, prefix, part, j))
        best = following
        cuts.append(cut)
    stages: list[int] = []
    end = n
    for part in range(num_stages - 1, -1, -1):
        start = cuts[part][end]
        stages[:0] = [part] * (end - start)
        end = start
    return stages


def _candidates(best: Sequence[int], prefix: Sequence[int], part: int, j: int) -> list[tuple[int, int]]:
    """Values of cutting before ``i``: max(best[i], sum of i..j). The first grows with i and the second falls, so the
    least lies where they cross.
    """
    if part == 0:
        return [(prefix[j], 0)]
    low = bisect_left(range(part, j), 0, key=lambda i: best[i] - (prefix[j] - prefix[i])) + part
    return [(max(best[i], prefix[j] - prefix[i]), i) for i in (low - 1, low) if part <= i < j]
