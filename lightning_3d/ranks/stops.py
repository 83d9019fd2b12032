"""Signals that stop a run, sent to one rank or to all, take effect on all ranks between the same two batches.

A signal interrupts a rank anywhere, where others may wait for it: neither a collective nor an exception can be right
there. The handler only notes the signal; all ranks then learn of it from the board, and agree on where to stop.

Each rank counts the batches that it has begun. One that knows of a signal waits before its next batch until each rank
is seen to wait before the same; if one is seen to have begun a later batch, which may need this rank, it goes on. A
rank that waits before batch n never began it, so when all are seen there, none will.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from threading import Lock

import torch.distributed as dist

from lightning_3d.ranks.watchdog import RankStatus

_POLLS = 0.02  # seconds between looks at the board


class Stops:
    """Signals to any rank, until all have agreed on where to heed them.

    Args:
        may_wait: Tells whether the other ranks still train.
    """

    def __init__(self, status: RankStatus, may_wait: Callable[[], bool]) -> None:
        self._status, self._may_wait = status, may_wait
        self._asked: int | None = None  # by a signal to this process
        self._pending: int | None = None  # for all ranks
        self._num_heeded = 0
        self._num_batches = 0
        self._place = -1  # 2n while this rank waits before batch n, odd while it is inside of one
        self._lock = Lock()  # so that no thread writes what another has changed

    @property
    def pending(self) -> int | None:
        """The signal that some rank got and that none has heeded yet."""
        return self._pending

    def ask(self, signum: int) -> None:
        """Note a signal to this process, in its handler."""
        self._asked = signum

    def look(self) -> None:
        """Exchange signals with the other ranks, in the thread of the watchdog."""
        with self._lock:
            store, name = self._status.store, f"stop/{self._num_heeded}"
            if self._pending is None and self._asked is not None:
                store.put_first(name, str(self._asked))
            if self._pending is None and (text := store.get(name)) is not None:
                self._pending = int(text)
            if self._pending is not None:
                self._tell()

    def look_together(self) -> None:
        """Learn of each signal that came before. Every rank calls it; it is a collective."""
        self.look()
        dist.barrier()
        self.look()

    def before_batch(self) -> int | None:
        """The signal that all ranks heed here, if there is one. Each rank calls it before each batch and at the end."""
        signum = self._agreed() if self._pending is not None else None
        if signum is None:
            self._num_batches += 1
            self._place = 2 * self._num_batches - 1
        return signum

    def _agreed(self) -> int | None:
        here = self._place = 2 * self._num_batches
        names = [f"place/{self._num_heeded}/{rank}" for rank in range(len(self._status.names))]
        while self._may_wait():
            with self._lock:
                self._tell()
            places = [int(text) for text in self._status.store.get_all(names) or []]
            if any(place > here for place in places):
                return None
            if places and all(place == here for place in places):
                return self._heed()
            time.sleep(_POLLS)
        return None

    def _heed(self) -> int | None:
        with self._lock:
            signum, self._pending = self._pending, None
            self._asked = None if self._asked == signum else self._asked
            self._num_heeded += 1
            return signum

    def _tell(self) -> None:
        self._status.store.put(f"place/{self._num_heeded}/{self._status.rank}", str(self._place))
