"""Ctrl+C: the first one ends a fit after its step, on all ranks, a second one at once; neither leaves ranks that wait.

Python runs the handler of a signal in the main thread, between two of its instructions: never, while that waits in a
collective for a rank that does not come. The system writes the signal to a socket at once, which the thread of the
watchdog reads.

    a rank computes                    the fit ends after its step (see stops.py)
    no rank does, and one waits        all end, as the step never will
    Ctrl+C once more                   the main thread raises; where it can't, all end
"""

from __future__ import annotations

import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from types import FrameType

from lightning_utilities.core.rank_zero import rank_zero_info

from lightning_3d.ranks.standstill import Standstill
from lightning_3d.ranks.stops import Stops
from lightning_3d.ranks.watchdog import Post

_PATIENCE = 10.0  # seconds without computing after a signal, until a rank counts as idle
_COMPUTES = 0.02  # seconds of CPU, between two looks, in which a main thread does more than wait
_APART = 1.0  # seconds between one Ctrl+C, which forks of this process may write once more, and another
_UNTIL_RAISED = 5.0  # seconds in which a main thread that can raises


class Interrupts:
    """Ctrl+C in a run.

    Args:
        stops: The signals of all ranks, among which the first one in a fit is heeded after a step.
        is_ending: Tells whether the main thread has begun to end the run.
        is_fit: Elsewhere the first one ends the run at once.
    """

    def __init__(
        self, post: Post, stops: Stops, standstill: Standstill, *, is_ending: Callable[[], bool], is_fit: bool
    ) -> None:
        self._post, self._stops, self._standstill, self._is_ending = post, stops, standstill, is_ending
        self._is_fit, self._num_left = is_fit, 2 if is_fit else 1  # until the run ends at once
        self._reader: socket.socket | None = None
        self._came_at = -_APART
        self._is_answered = True  # by its handler
        self._cpu, self._since = 0.0, 0.0
        self._is_idle = False

    @contextmanager
    def noted(self) -> Iterator[None]:
        """Note Ctrl+C inside, unless the program has a handler of its own.

        Python's handler could raise inside of torch, where an exception ends the process.
        """
        default = signal.default_int_handler
        if signal.getsignal(signal.SIGINT) is not default or threading.current_thread() is not threading.main_thread():
            yield
            return
        if self._is_fit:
            signal.signal(signal.SIGINT, self._on_interrupt)
        try:
            with self._written():
                yield
        finally:
            if signal.getsignal(signal.SIGINT) == self._on_interrupt:
                signal.signal(signal.SIGINT, default)

    def look(self) -> None:
        """From time to time, in the thread of the watchdog."""
        now = time.monotonic()
        if self._has_come():
            self._num_left -= now > self._came_at + _APART
            self._came_at = now
            if self._is_fit:
                self._stops.ask(signal.SIGINT)
        if self._num_left <= 0 and now > self._came_at + _UNTIL_RAISED and not self._is_ending():
            self._end("")
        self._look_at_step(now)

    def _on_interrupt(self, signum: int, frame: FrameType | None) -> None:
        self._is_answered = True
        signal.signal(signal.SIGINT, signal.default_int_handler)
        rank_zero_info("Ctrl+C: the fit ends after this step, on all ranks; once more ends it at once.")
        self._stops.ask(signum)

    @contextmanager
    def _written(self) -> Iterator[None]:
        """Let the system write signals for the watchdog, unless it does for somebody else, such as asyncio."""
        reader, writer = socket.socketpair()
        with reader, writer:
            for end in (reader, writer):
                end.setblocking(False)
            if (others := signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)) != -1:
                signal.set_wakeup_fd(others)
                yield
                return
            self._reader = reader
            try:
                yield
            finally:
                self._reader = None
                if (others := signal.set_wakeup_fd(-1)) != writer.fileno():
                    signal.set_wakeup_fd(others)

    def _has_come(self) -> bool:
        """Whether Ctrl+C came since the last look, which no handler of the user's takes."""
        reader, written = self._reader, b""
        with suppress(OSError):  # nothing is there
            written = b"" if reader is None else reader.recv(256)
        if signal.SIGINT not in written:
            return False
        handler = signal.getsignal(signal.SIGINT)
        self._is_answered = handler != self._on_interrupt  # which takes itself off
        return handler in (self._on_interrupt, signal.default_int_handler)

    def _look_at_step(self, now: float) -> None:
        """Count this rank while a signal waits for the end of a step in which it computes nothing."""
        cpu = self._standstill.cpu_seconds()
        if self._stops.pending not in (signal.SIGINT, signal.SIGTERM) or cpu > self._cpu + _COMPUTES:
            self._since = now
        self._cpu = cpu
        is_idle, board = now > self._since + _PATIENCE, self._post.board
        if is_idle != self._is_idle:
            where = self._standstill.where() if self._is_answered else self._standstill.where("waits")
            board.put(f"idle/{self._post.rank}", where)
            board.add("idle", 1 if is_idle else -1)
            self._is_idle = is_idle
        if self._post.rank == 0 and is_idle and board.add("idle", 0) == len(self._post.names):
            places = self._post.first_at("idle")
            if any(place.startswith("waits") for place in places):
                told = "; ".join(f"rank {rank} {place}" for place, rank in places.items())
                self._end(f" The step does not end, as no rank has computed for {_PATIENCE:g} s: {told}.")

    def _end(self, why: str) -> None:
        failure = self._post.failed(f"KeyboardInterrupt: The run was interrupted.{why}")
        self._post.board.put_first("failure", replace(failure, is_standstill=True).to_text())
