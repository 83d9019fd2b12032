"""Telling in the log what a long wait is for: nothing for two seconds, then one line, of rank 0."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Timer

from lightning_utilities.core.rank_zero import rank_zero_info

_PATIENCE = 2.0  # seconds before anything is logged


@contextmanager
def long_wait(what: str) -> Iterator[None]:
    """Log what is waited for inside, if that takes long."""
    timer = Timer(_PATIENCE, rank_zero_info, [f"{what} ..."])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


class CountedWait:
    """Long waits of one kind, counted with their seconds when they are over."""

    def __init__(self) -> None:
        self.num, self.seconds = 0, 0.0

    @contextmanager
    def __call__(self, what: str) -> Iterator[None]:
        """Log what is waited for."""
        start = time.monotonic()
        with long_wait(what):
            yield
        self.num, self.seconds = self.num + 1, self.seconds + time.monotonic() - start

    def take(self) -> tuple[int, float]:
        """How many waits are over, and their seconds, since this was last asked."""
        taken, self.num, self.seconds = (self.num, self.seconds), 0, 0.0
        return taken
