"""Ranks that run a step's code together: each is asked what it comes to before any of them waits for another.

rank 0      d(x), for an image that it alone logs      ─┐ compared: both raise, in place of waiting
rank 1      the following call of all, g(z)            ─┘ for each other, or taking d(x) for g(z)
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest
from zlib import crc32

import torch.distributed as dist

from lightning_3d.distributed.agreement import gather_rows
from lightning_3d.errors import StepError
from lightning_3d.frames import SourceLine, line_text, user_lines


@dataclass(frozen=True)
class _Doing:
    """The exchange that a rank came to, and the lines of user code that led there, from the outermost."""

    what: str
    lines: tuple[SourceLine, ...]


class Lockstep:
    """Compares what the ranks of a pipeline come to."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self._parted: _Doing | None = None  # where ranks first came to the same from other lines, in this step

    def sync_check(self, what: str, number: int = 0, owner_rank: int = 0) -> int:
        """Collective. Before ranks wait for each other, on their hosts.

        Args:
            what: This rank came to.
            number: Goes with it, so that what follows needs no further message.
            owner_rank: Index on the pp axis of the rank that has the block.

        Returns:
            Its number.

        Raises:
            StepError: on all ranks, if they do not come to the same.
        """
        doing = _Doing(what, tuple(user_lines(sys._getframe(1))))
        check = crc32(what.encode()) << 31 | crc32(repr(doing.lines).encode()) >> 1
        rows = gather_rows([check, number], self._group)
        if self._parted is None and any(theirs != check for theirs, _ in rows):  # by calls of the same block, at first
            self._parted = doing
        if any(theirs >> 31 != check >> 31 for theirs, _ in rows):
            everyone: list[_Doing] = [doing] * len(rows)
            dist.all_gather_object(everyone, self._parted or doing, self._group)
            self._parted = None
            raise StepError(_told(everyone, dist.get_process_group_ranks(self._group)))
        return rows[owner_rank][1]

    def end_step(self) -> None:
        """Collective. At the end of a step's code."""
        self.sync_check("the end of the step")
        self._parted = None


def _told(everyone: Sequence[_Doing], ranks: Sequence[int]) -> str:
    """Text: the exchange that each rank came to, at the outermost line where they parted."""
    columns = enumerate(zip_longest(*(doing.lines for doing in everyone)))
    parted = next((i for i, lines in columns if len(set(lines)) > 1), len(everyone[0].lines))
    places: dict[str, list[str]] = {}
    for rank, doing in zip(ranks, everyone, strict=True):
        channel = "".join(f" (at {line_text(each)})" for each in doing.lines[parted : parted + 1])
        places.setdefault(f"{doing.what}{channel}", []).append(str(rank))
    told = ", ".join(f"rank {' and '.join(of_ranks)} came to {place}" for place, of_ranks in places.items())
    return (
        f"The ranks of a pipeline do not run the same step: {told}. Each holds some of the blocks, so they call blocks"
        " and read their weights together. Do it on every rank, without `if self.global_rank == 0`, and keep what only"
        " one is to do, as logging, for the result."
    )
