"""How a plan is put into words: runs of blocks that are alike, and loads with their units."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile

from lightning_3d.planning.loads import Unit

_MIB = 1024**2
_LONGEST_PATTERN = 12  # blocks in a row that are looked at as one repeated pattern


def folded(blocks: Sequence[tuple[str, str]]) -> list[str]:
    """Blocks, given as (FQN, class), in few lines: what repeats a pattern of classes shares one.

    ``layers.0, layers.1, layers.2`` become ``layers.0 .. 2 (3 x Block)``.
    """
    kinds = [kind for _, kind in blocks]
    lines, start = [], 0
    while start < len(blocks):
        period, repeats = _pattern(kinds, start)
        stop = start + period * repeats
        if repeats == 1:
            lines.append(f"{blocks[start][0]} ({kinds[start]})")
        else:
            pattern = ", ".join(kinds[start : start + period])
            lines.append(f"{_span(blocks[start][0], blocks[stop - 1][0])} ({repeats} x {pattern})")
        start = stop
    return lines


def quantity(value: int, unit: Unit) -> str:
    """A load with its unit, such as ``1.2 ms``."""
    if unit == "bytes":
        return f"{value / _MIB:,.1f} MiB" if value >= _MIB / 10 else f"{value / 1024:,.1f} KiB"
    if unit == "nanoseconds":
        return f"{value / 1e6:,.2f} ms"
    return f"{value:,}"


def _pattern(kinds: Sequence[str], start: int) -> tuple[int, int]:
    """(length, repeats) of the pattern that covers the most from ``start`` on; the shortest such."""
    best = (1, 1)
    for period in range(1, min(_LONGEST_PATTERN, (len(kinds) - start) // 2) + 1):
        pattern, repeats = kinds[start : start + period], 1
        while kinds[start + repeats * period : start + (repeats + 1) * period] == pattern:
            repeats += 1
        if repeats > 1 and period * repeats > best[0] * best[1]:
            best = (period, repeats)
    return best


def _span(first: str, last: str) -> str:
    """``a.b.0 .. 3`` for ``a.b.0`` and ``a.b.3``."""
    pairs = zip(first.split("."), last.split("."), strict=False)
    num_shared = len(list(takewhile(lambda pair: pair[0] == pair[1], pairs)))
    return f"{first} .. {'.'.join(last.split('.')[num_shared:])}"
