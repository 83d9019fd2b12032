"""Telling what a long wait is for: nothing for two seconds, then a line in the log of rank 0."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from threading import Timer

from lightning_utilities.core.rank_zero import rank_zero_info

Wait = Callable[[str], AbstractContextManager[None]]
"""Takes what is waited for; the wait is as long as the context."""

_PATIENCE = 2.0  # seconds before anything is told


@contextmanager
def telling(what: str) -> Iterator[None]:
    """Tell of a wait."""
    timer = Timer(_PATIENCE, rank_zero_info, [f"{what} ..."])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def not_told(what: str) -> AbstractContextManager[None]:
    """A wait that nobody is told of."""
    return nullcontext()


class CountedWait:
    """Tells of waits, and counts those that are over and their seconds."""

    def __init__(self, wait: Wait) -> None:
        self._wait = wait
        self.num, self.seconds = 0, 0.0

    @contextmanager
    def __call__(self, what: str) -> Iterator[None]:
        """Tell of a wait."""
        start = time.monotonic()
        with self._wait(what):
            yield
        self.num, self.seconds = self.num + 1, self.seconds + time.monotonic() - start

    def take(self) -> tuple[int, float]:
        """How many waits are over, and their seconds, since this was last asked."""
        taken, self.num, self.seconds = (self.num, self.seconds), 0, 0.0
        return taken
