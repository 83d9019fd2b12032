"""Collectives that user code makes between steps: a rank that makes one alone raises, in place of waiting for ever.

Steps run alike on all ranks, as a rule. Between them nothing keeps code from running on one rank alone
(``@rank_zero_only``), and a collective made there would wait for ever, or meet another one of the other ranks. So
before it the ranks meet: each leaves on the board that it has come, and looks for the next. Each also counts the points
of the Trainer that all ranks pass (a step, a reduction, a checkpoint). One that has passed more of them has not come,
nor one that waits in a collective while all others wait, too (`Standstill`).

In a step, ranks that have the same samples meet too, where user code asks them for a collective: the first time that
they come to a line, as code that runs on one of them alone has lines that the others do not come to.

    rank 0      points 7, calls a block, looks for rank 1: finds that it has passed 8 and raises
    rank 1      points 7, 8: the next training step
"""

from __future__ import annotations

import sys
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress

import torch.distributed as dist

from lightning_3d.errors import StepError
from lightning_3d.ranks.standstill import user_line, user_lines
from lightning_3d.ranks.status_store import StatusStore
from lightning_3d.torch_internals.autograd import is_in_backward

_SHORTEST, _LONGEST = 0.0005, 0.05  # seconds between two looks


class Rendezvous:
    """Where ranks meet before a collective between steps.

    Args:
        store: For it alone.
        timeout: Seconds that a rank waits for others that have not passed it.
    """

    def __init__(self, store: StatusStore, *, rank: int, timeout: float) -> None:
        self._store, self._rank, self._timeout = store, rank, timeout
        self._num_points = 0
        self._num_met: Counter[str] = Counter()
        self._depth = 0  # contexts of `in_lockstep` that are open
        self._known = set[object]()  # what was met for in steps, and at which lines
        self.is_standstill: Callable[[], bool] = lambda: False
        """Whether all ranks are known to wait, here or in collectives."""

    @classmethod
    def open(cls, timeout: float) -> Rendezvous:
        """A new one for the next run. Every rank opens as many."""
        opened = cls(StatusStore.open(), rank=dist.get_rank(), timeout=timeout)
        weakref.finalize(opened, _leave, opened._store, opened._rank)
        return opened

    def __deepcopy__(self, memo: dict[int, object]) -> Rendezvous:
        return self

    def sync_point(self) -> None:
        """At a point of the Trainer that all ranks pass; inside of a step none is, as stages run parts of it."""
        if self._depth > 0:
            return
        self._num_points += 1
        self._store.put(f"points/{self._rank}", str(self._num_points))

    @contextmanager
    def in_lockstep(self) -> Iterator[None]:
        """Run what all ranks run alike, as a step: nobody needs to meet inside."""
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1

    @property
    def is_agreed(self) -> bool:
        """Whether the present code runs alike on all ranks anyway."""
        return self._depth > 0 or is_in_backward()

    def sync_check(self, ranks: Sequence[int], what: str, *, in_steps: bool = False) -> None:
        """Before a collective of these ranks, for what the user's code does; each calls it.

        Args:
            in_steps: Whether in steps, too, once at each line; for ranks that have the same samples.

        Raises:
            StepError: another of them does something else.
        """
        if len(ranks) < 2 or (self.is_agreed and not (in_steps and self._is_new(what))):
            return
        group = f"{ranks[0]}-{ranks[-1]}-{len(ranks)}"
        self._num_met[group] += 1
        number = self._num_met[group]
        self._store.put(f"met/{group}/{self._rank}", f"{number} {what}")
        following = ranks[(list(ranks).index(self._rank) + 1) % len(ranks)]  # as each looks for one, all are looked for
        self._wait_for(following, group, number, what)

    def _is_new(self, what: str) -> bool:
        """Whether a step has not come to this for the same at the same lines."""
        place = (what, user_lines(sys._getframe(2)))
        is_new = not is_in_backward() and place not in self._known
        if is_new:
            self._known.add(place)
        return is_new

    def _wait_for(self, other: int, group: str, number: int, what: str) -> None:
        deadline, pause = time.monotonic() + self._timeout, _SHORTEST
        while True:
            points = int(self._store.get(f"points/{other}") or 0)  # before what it writes ahead of further points
            there, _, theirs = (self._store.get(f"met/{group}/{other}") or "").partition(" ")
            if int(there or 0) >= number:
                if int(there) == number and theirs != what:
                    raise StepError(f"{self._alone(what)} Rank {other} came with {theirs} instead. {_FIX}")
                return
            if points > self._num_points or self.is_standstill():
                raise StepError(f"{self._alone(what)} Rank {other} has gone on without it. {_FIX}")
            if time.monotonic() > deadline:
                raise StepError(f"{self._alone(what)} Rank {other} has not come to it in {self._timeout:g} s. {_FIX}")
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST)

    def _alone(self, what: str) -> str:
        where = f"{'In a step' if self.is_agreed else 'Between steps'}, at {user_line(sys._getframe())},"
        return f"{where} rank {self._rank} came to {what}, which takes other ranks, as they hold parts of the model."


def _leave(store: StatusStore, rank: int) -> None:
    with suppress(dist.DistError):  # the process that keeps the board has ended
        store.put(f"points/{rank}", str(sys.maxsize))


_FIX = (
    "Do it on every rank, without @rank_zero_only or `if trainer.is_global_zero`, and keep what only one is to do, as"
    " logging, for the result."
)
