"""The end of a run that has failed: all ranks learn of the first failure, and whether they failed alike."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import torch.distributed as dist

from lightning_3d.ranks.failure import Failure, error_text, is_lost_connection, source_line
from lightning_3d.ranks.watchdog import PERIOD, RankStatus, Watchdog

Answer = TypeVar("Answer")

_UNTIL_TOLD = 8 * PERIOD  # seconds in which the failure of another rank is on the board, or its beats are missed
_UNTIL_ALIKE = 1.0  # seconds in which ranks that raise alike have all raised
_UNTIL_SEEN = 3.0  # seconds that a failed rank stays for the others
_POLLS = 0.02  # seconds between looks at the board


@dataclass(frozen=True, kw_only=True)
class Ending:
    """How a run ends."""

    first: Failure
    """The first failure of any rank."""

    is_alike: bool
    """Whether all ranks raised the same in the same step, so that they can still do something together."""


def settle(
    status: RankStatus,
    watchdog: Watchdog,
    error: BaseException,
    *,
    explained: Callable[[], Failure | None] = lambda: None,
) -> Ending:
    """Tell the other ranks of an exception, and stay until they know.

    Every rank that raises calls it; it waits for others a few seconds at most.

    Args:
        error: The exception that ends this rank's run.
        explained: Tells why a connection to another rank may be lost, if that is known.
    """
    watchdog.is_ending = True
    if watchdog.failure is not None and is_lost_connection(error):  # the board may have ended with the rank that failed
        return Ending(first=watchdog.failure, is_alike=False)
    try:
        is_alike = not is_lost_connection(error) and _is_alike(status, error)
        first = _first(status, watchdog, error, explained)
        status.see("main")
        if not is_alike:
            num_alive = len(status.names) - (first.rank != status.rank)
            _wait(lambda: status.store.add("seen", 0) >= num_alive or None, _UNTIL_SEEN)
        return Ending(first=first, is_alike=is_alike)
    except dist.DistError:
        mine = None if is_lost_connection(error) else status.failed(error_text(error))
        return Ending(first=watchdog.failure or mine or status.board_failed(), is_alike=False)


def _first(
    status: RankStatus, watchdog: Watchdog, error: BaseException, explained: Callable[[], Failure | None]
) -> Failure:
    mine = status.failed(error_text(error))
    if is_lost_connection(error):
        status.store.put("lost", "")
        mine = _wait(lambda: watchdog.failure or _read(status), _UNTIL_TOLD) or explained() or mine
    return Failure.from_text(status.store.put_first("failure", mine.to_text()))


def _read(status: RankStatus) -> Failure | None:
    text = status.store.get("failure")
    return None if text is None else Failure.from_text(text)


def _is_alike(status: RankStatus, error: BaseException) -> bool:
    """Whether all ranks raise this, as rank 0 sees in time, or the first one that waits no longer denies."""
    store = status.store
    store.put(f"raised/{status.rank}", f"{status.step()} {type(error).__name__} {source_line(error)}")
    store.add("raised", 1)

    def decided() -> str | None:
        if status.rank == 0 and store.add("raised", 0) == len(status.names):
            return store.put_first("alike", "yes" if len(status.first_at("raised")) == 1 else "no")
        return store.get("alike")

    return (_wait(decided, _UNTIL_ALIKE) or store.put_first("alike", "no")) == "yes"


def _wait(look: Callable[[], Answer | None], seconds: float) -> Answer | None:
    """The first answer, if one comes in time."""
    end = time.monotonic() + seconds
    while (answer := look()) is None and time.monotonic() < end:
        time.sleep(_POLLS)
    return answer
