"""Telling that ranks have different numbers of batches in an epoch, as datasets of unknown length may give them.

A rank that has more waits in its next step for one that has none left, which nobody else would tell: that one is in a
later collective, or has ended.

    rank 0      epoch 3: batch 6, waits in the reduction of its gradients
    rank 1      epoch 3: 5 batches, waits in a reduction at the end of the epoch
"""

from __future__ import annotations

import time

from lightning_3d.ranks.failure import Failure
from lightning_3d.ranks.watchdog import RankStatus


class Epochs:
    """The batches of this rank, and how many others have.

    Args:
        timeout: Seconds in one batch after which a rank looks at what others have: one that has gone on to its next
            epoch may take a while to begin it, and lengths may differ where only the number of steps is set.
    """

    def __init__(self, status: RankStatus, *, timeout: float) -> None:
        self._status, self._timeout = status, timeout
        self._batch = (-1, 0)  # epoch, and which of its batches this rank is in, counted from 1
        self._since = time.monotonic()
        self._length: tuple[int, int] | None = None  # of the last epoch whose end this rank knows: epoch, batches
        self._told: tuple[int, int] | None = None

    def begin_batch(self, epoch: int, number: int, *, is_last: bool) -> None:
        """Before each training step."""
        self._batch, self._since = (epoch, number), time.monotonic()
        if is_last:
            self._length = self._batch

    def look(self) -> None:
        """From time to time, in another thread: tell others, and whether one has fewer where this rank waits."""
        self.tell()
        if time.monotonic() > self._since + self._timeout and (failure := self.shorter()) is not None:
            self._status.store.put_first("failure", failure.to_text())

    def tell(self) -> None:
        """Leave the length of this rank's epoch on the board, unless another rank has a shorter one there."""
        if (length := self._length) is not None and length != self._told:
            epoch, number = length
            mine, store = f"{number} {self._status.rank}", self._status.store
            if number < int(store.put_first(f"epoch/{epoch}", mine).split()[0]):
                store.put(f"epoch/{epoch}", mine)
            self._told = length

    def shorter(self) -> Failure | None:
        """A rank that has fewer batches in this epoch than this one has begun."""
        epoch, number = self._batch
        if (text := self._status.store.get(f"epoch/{epoch}")) is None:
            return None
        length, rank = map(int, text.split())
        if length >= number:
            return None
        error = (
            f"it has {length} batches in epoch {epoch}, but rank {self._status.rank} is in batch {number}: the"
            " dataset gives ranks different numbers of batches. Give all the same number, as by dropping what"
            f" is left over, or set Trainer(limit_train_batches={length})"
        )
        return self._status.silent(rank, error)
