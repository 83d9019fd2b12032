"""Telling that all ranks wait for each other, as where one reads a weight or calls a block that others do not.

Such a wait ends with the timeout of collectives, half an hour later. The thread of the watchdog sees earlier where the
main thread is: it waits if it has stood in a collective, or at a rendezvous, and has computed nothing for a while. Each
rank counts itself while it waits; while one computes, however long, the count is short, and nobody ends.

    rank 0      waits at a rendezvous, for a use of head.weight         counted      raises, as all are counted
    rank 1      waits in all_reduce, of its next step                   counted      ends with rank 0
"""

from __future__ import annotations

import sys
import threading
import time
from dataclasses import dataclass, replace
from itertools import takewhile
from pathlib import Path
from types import FrameType

from lightning_3d.frames import module_of, package_of, with_callers
from lightning_3d.ranks.failure import Failure
from lightning_3d.ranks.watchdog import RankStatus

_PATIENCE = 4.0  # seconds in one place until a rank counts as waiting
_CERTAIN = 2.0  # seconds that all ranks wait until one at a rendezvous raises: in less a count may be late
_LONGEST = 12.0  # seconds that all wait in collectives, at different lines, until the run ends
_COMPUTES = 0.02  # seconds of CPU in which a main thread does more than wait

_WAITING = ("distributed_c10d", "_functional_collectives", "fsdp", "tensor", "nn")
_COLLECTIVES = tuple(f"torch.distributed.{name}" for name in _WAITING)
_REPLICAS, _RENDEZVOUS = "lightning_3d.zero.dp_comm", "lightning_3d.ranks.rendezvous"
_PACKAGES = {"torch", "lightning", "lightning_3d", "contextlib"}


@dataclass(frozen=True)
class _Place:
    """Where a main thread waits."""

    what: str
    is_rendezvous: bool


class Standstill:
    """Sees whether this rank waits, and whether all do.

    Args:
        status: Of this rank; the thread that makes this is the one that trains.
    """

    def __init__(self, status: RankStatus) -> None:
        self._status, self._thread = status, threading.get_ident()
        self._place: _Place | None = None
        self._since, self._cpu = 0.0, 0.0
        self._is_counted = False
        self._all_since: float | None = None
        self.is_certain = False
        """Whether all ranks wait, and so will for ever."""

    def look(self) -> None:
        """From time to time, in the thread of the watchdog."""
        now, place, cpu = time.monotonic(), _place_of(self._frame()), self._cpu_seconds()
        is_same = place == self._place and (place is None or place.is_rendezvous or cpu < self._cpu + _COMPUTES)
        if not is_same:
            self._place, self._since, self._cpu = place, now, cpu
        self._count(is_waiting=is_same and place is not None and now > self._since + _PATIENCE)
        if not (self._is_counted and self._are_all_counted()):
            self._all_since, self.is_certain = None, False
            return
        self._all_since = self._all_since or now
        self.is_certain = now > self._all_since + _CERTAIN
        if self._status.rank == 0 and now > self._all_since + _LONGEST and (failure := self._failure()) is not None:
            self._status.store.put_first("failure", failure.to_text())

    def _frame(self) -> FrameType | None:
        return sys._current_frames().get(self._thread)

    def _cpu_seconds(self) -> float:
        """Seconds for which the main thread has computed; on other systems than Linux it never counts as waiting."""
        if sys.platform != "linux":
            return time.monotonic()
        return time.clock_gettime(time.pthread_getcpuclockid(self._thread))

    def _count(self, *, is_waiting: bool) -> None:
        if is_waiting == self._is_counted:
            return
        if is_waiting:
            assert self._place is not None
            self._status.store.put(f"waits/{self._status.rank}", self._place.what)
        self._status.store.add("waiting", 1 if is_waiting else -1)
        self._is_counted = is_waiting

    def _are_all_counted(self) -> bool:
        return self._status.store.add("waiting", 0) == len(self._status.names)

    def _failure(self) -> Failure | None:
        """The failure of ranks that wait at different lines; at one line they may have much to send each other."""
        places = self._status.first_at("waits")
        if len(places) < 2:
            return None
        waits = "; ".join(f"rank {rank} {place}" for place, rank in places.items())
        error = (
            f"StepError: All ranks wait for each other: {waits}. Code that takes other ranks (a call of the model or of"
            " a block, a read of a weight, a gradient or logits that lie in parts) has run on some ranks alone. Run it"
            " on all, without @rank_zero_only or `if trainer.is_global_zero`, and keep what only one is to do, as"
            " logging, for the result."
        )
        return replace(self._status.failed(error), is_standstill=True)


def user_line(frame: FrameType | None) -> str:
    """The innermost line of user code that a frame is of, or was called by."""
    found = next((frame for frame in with_callers(frame) if package_of(frame) not in _PACKAGES), None)
    return "an unknown line" if found is None else f"{Path(found.f_code.co_filename).name}:{found.f_lineno}"


def user_lines(frame: FrameType | None) -> tuple[tuple[int, int], ...]:
    """All such lines, down to where Lightning called the user's code: the same where that comes again."""
    called = takewhile(lambda frame: package_of(frame) != "lightning", with_callers(frame))
    return tuple((id(frame.f_code), frame.f_lineno) for frame in called if package_of(frame) not in _PACKAGES)


def _place_of(frame: FrameType | None) -> _Place | None:
    """Where the main thread waits, if it does: beneath the user's code, in what torch or this package waits with."""
    for inner in takewhile(lambda frame: package_of(frame) in _PACKAGES, with_callers(frame)):
        module, name = module_of(inner), inner.f_code.co_name
        if module == _RENDEZVOUS:
            return _Place(what=f"waits for others at {user_line(inner)}", is_rendezvous=True)
        if name != "wrapper" and (module.startswith(_COLLECTIVES) or (module == _REPLICAS and name == "__call__")):
            return _Place(what=f"waits in {name} at {user_line(inner)}", is_rendezvous=False)
    return None
