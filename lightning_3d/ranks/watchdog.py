"""Threads on every rank that show that its process lives, and learn of the first failure of any rank.

A rank that waits in a collective learns nothing of a rank that failed until the process of that one has ended, and then
only that a connection is lost. If that process is stopped, it learns nothing before the timeout of collectives.

    a rank raises             it leaves its failure on the board (see ending.py), and each thread reads it
    all wait for each other   rank 0 leaves that as the failure (see standstill.py)
    a process is stopped      the rank before it misses its beats, and leaves that as the failure
    a process has ended       ranks that lost a connection say so, and the rank before it waits for beats no longer
    a process is quiet        it may hold Python's lock, as `json.load` does: ranks of its machine that see it run beat
                              for it
    a main thread waits on    its own thread ends the process, with the failure as its last words

Each rank watches the next one that has not left, and the last one rank 0, so that any number of ranks takes a few
requests per rank and beat.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from threading import Event, Thread

import torch.distributed as dist

from lightning_3d.ranks.failure import ENDED_SILENTLY, Failure
from lightning_3d.ranks.processes import is_running, machine_of, this_process
from lightning_3d.ranks.status_store import StatusStore

_log = logging.getLogger(__name__)

PERIOD = 0.5
"""Seconds between beats."""

_UNTIL_MISSED = 4 * PERIOD  # seconds without a beat after which a process counts as ended, once connections are lost
_UNTIL_ENDED = 30.0  # seconds that a main thread has to end after a failure
_UNTIL_SEEN = 2.0  # seconds in which other ranks have read of it, where all main threads wait for ever


@dataclass(frozen=True, kw_only=True)
class RankStatus:
    """A rank as others call it, and its board."""

    store: StatusStore
    """The board of this run alone."""

    rank: int

    names: list[str]
    """All ranks as errors call them."""

    step: Callable[[], str]
    """Tells in which step this rank is."""

    @property
    def others(self) -> list[int]:
        """All ranks but this."""
        return [rank for rank in range(len(self.names)) if rank != self.rank]

    def failed(self, error: str) -> Failure:
        """A failure of this rank, here and now."""
        return Failure(rank=self.rank, place=f"{self.names[self.rank]}, {self.step()}", error=error)

    def silent(self, rank: int, error: str) -> Failure:
        """The failure of another rank that could not tell of it."""
        beat = self.store.get(f"beat/{rank}") or ""
        return Failure(rank=rank, place=f"{self.names[rank]}, last seen in {beat.partition(' ')[2]}", error=error)

    def board_failed(self, how: str = ENDED_SILENTLY) -> Failure:
        """The failure of the process that keeps the board."""
        return Failure(rank=0, place=self.names[0], error=f"its process, or that of the launcher, {how}")

    def see(self, by: str) -> None:
        """Count this rank among those that know of the failure; once, whichever thread comes first."""
        if self.store.put_first(f"seen/{self.rank}", by) == by:
            self.store.add("seen", 1)

    def first_at(self, kind: str) -> dict[str, int]:
        """Each place that ranks have left under this name -> the first rank there; empty until all have left one."""
        first_ranks = dict[str, int]()
        for rank, place in enumerate(self.store.get_all(f"{kind}/{rank}" for rank in range(len(self.names))) or []):
            first_ranks.setdefault(place, rank)
        return first_ranks


class Watchdog:
    """Beats for this rank and watches the others, from ``start`` to ``close``.

    Args:
        timeout: Seconds without a beat, of its own or of a rank of its machine that sees it run, after which a process
            counts as stopped.
        polls: Are called in the thread with every beat.
        before_exit: Is called before the thread ends the process.
    """

    def __init__(
        self,
        status: RankStatus,
        *,
        timeout: float,
        polls: Sequence[Callable[[], None]],
        before_exit: Callable[[], None],
    ) -> None:
        self._status, self._timeout, self._looks, self._before_exit = status, timeout, polls, before_exit
        self._num_beats = 0
        self._watched = status.rank
        self._last_beat, self._since = "", 0.0  # of the watched rank, and when it was new
        self._has_told_quiet = self._has_first_left = False
        self._machine = machine_of(this_process())
        self._vouched: dict[int, tuple[str, str]] = {}  # process and last beat of ranks of this machine that were quiet
        self._closing = Event()
        self._age = 0.0  # seconds, without those in which this process was stopped itself
        self._looked_at: float | None = None  # None where nothing is left to look at
        self._failed_at: float | None = None
        names = {"lightning_3d.watchdog": self._run, "lightning_3d.watchdog_clock": self._run_clock}
        self._threads = [Thread(target=run, name=name, daemon=True) for name, run in names.items()]
        self.failure: Failure | None = None
        """The first failure, once it is known here."""
        self.is_ending = False
        """Whether the main thread has begun to end the run, so that nothing waits."""

    def start(self) -> None:
        """Begin to beat."""
        self._status.store.put(f"process/{self._status.rank}", this_process())
        self._beat()
        self._looked_at = self._age
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        """End both threads."""
        self._closing.set()
        for thread in self._threads:
            thread.join()

    def _run(self) -> None:
        try:
            while self.failure is None and not self._closing.wait(PERIOD):
                self._look()
                self._looked_at = self._age
        except dist.DistError:
            if not self._has_first_left:
                self.failure = self.failure or self._status.board_failed()
        self._looked_at = None

    def _run_clock(self) -> None:
        """End the process in time, also where the other thread waits for a board that is stopped with its process."""
        last = time.monotonic()
        while not self._closing.wait(PERIOD):
            now = time.monotonic()
            self._age, last = self._age + min(now - last, 2 * PERIOD), now
            if self._looked_at is not None and self._age > self._looked_at + self._timeout:
                self.failure = self._status.board_failed(f"has given no sign of life for {self._timeout:g} s")
                self._end()
            if self.failure is not None and not self.is_ending:
                self._failed_at = self._failed_at or self._age
                until_ended = _UNTIL_SEEN if self.failure.is_standstill else min(_UNTIL_ENDED, self._timeout)
                if self._age > self._failed_at + until_ended:
                    self._end()

    def _look(self) -> None:
        self._beat()
        for look in self._looks:
            look()
        store = self._status.store
        if (stopped := self._stopped()) is not None:
            store.put_first("failure", stopped.to_text())
        self._vouch()
        self._has_first_left = store.get("left/0") is not None
        if (text := store.get("failure")) is not None:
            self.failure = Failure.from_text(text)
            self._status.see("watchdog")

    def _beat(self) -> None:
        self._num_beats += 1
        self._status.store.put(f"beat/{self._status.rank}", f"{self._num_beats} {self._status.step()}")

    def _stopped(self) -> Failure | None:
        """The next rank, if it has not beaten for too long."""
        status, store = self._status, self._status.store
        while self._watched == status.rank or store.get(f"left/{self._watched}") is not None:
            self._watched = (self._watched + 1) % len(status.names)
            self._last_beat, self._since = "", self._age
            if self._watched == status.rank:  # all others have left
                return None
        beat = store.get(f"beat/{self._watched}")
        if beat is None or beat != self._last_beat:  # it is to begin, or has beaten
            self._last_beat, self._since, self._has_told_quiet = beat or "", self._age, False
            return None
        missed = self._age - self._since
        if missed > self._timeout / 2 and not self._has_told_quiet:
            self._has_told_quiet = True
            store.append(f"quiet/{machine_of(store.get(f'process/{self._watched}') or '')}", f"{self._watched} ")
        if missed > _UNTIL_MISSED and store.get("lost") is not None:
            return status.silent(self._watched, f"its process {ENDED_SILENTLY}")
        if missed > self._timeout:
            return status.silent(self._watched, f"its process has given no sign of life for {self._timeout:g} s")
        return None

    def _vouch(self) -> None:
        """Beat for ranks that were quiet, where they do not and their processes run on this machine."""
        store, me = self._status.store, self._status.rank
        for rank in set(map(int, (store.get(f"quiet/{self._machine}") or "").split())) - {me}:
            process, last_beat = self._vouched.get(rank) or (store.get(f"process/{rank}") or "", "")
            beat = store.get(f"beat/{rank}") or ""
            if beat == last_beat and is_running(process):
                beat = f"{self._num_beats}-of-{me} {beat.partition(' ')[2]}"
                store.put(f"beat/{rank}", beat)
            self._vouched[rank] = process, beat

    def _end(self) -> None:
        """End the process, whose main thread waits for a rank that will not come."""
        _log.error("%s ends: it waits for others, and %s", self._status.names[self._status.rank], self.failure)
        self._before_exit()
        logging.shutdown()
        os._exit(1)
