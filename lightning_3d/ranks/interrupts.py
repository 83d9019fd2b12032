"""Ctrl+C: the first one ends a fit after its step, on all ranks, a second one at once; neither leaves ranks that wait.

Python runs the handler of a signal in the main thread, between two of its instructions: never, while that waits in a
collective for a rank that does not come. The system writes the signal to a socket at once, which the thread of the
watchdog reads.

    Ctrl+C               the fit ends after its step (see stops.py)
    Ctrl+C once more     the main thread raises; where it can't, all ranks end
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

from lightning_3d.ranks.stops import Stops
from lightning_3d.ranks.watchdog import RankStatus

_APART = 1.0  # seconds between one Ctrl+C, which forks of this process may write once more, and another
_UNTIL_RAISED = 5.0  # seconds in which a main thread that can raises


class Interrupts:
    """Ctrl+C in a run.

    Args:
        stops: The signals of all ranks, among which the first one in a fit is heeded after a step.
        is_ending: Tells whether the main thread has begun to end the run.
        is_fit: Elsewhere the first one ends the run at once.
    """

    def __init__(self, status: RankStatus, stops: Stops, *, is_ending: Callable[[], bool], is_fit: bool) -> None:
        self._status, self._stops, self._is_ending = status, stops, is_ending
        self._is_fit, self._num_left = is_fit, 2 if is_fit else 1  # until the run ends at once
        self._reader: socket.socket | None = None
        self._came_at = -_APART

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
            failure = self._status.failed("KeyboardInterrupt: The run was interrupted.")
            self._status.store.put_first("failure", replace(failure, is_standstill=True).to_text())

    def _on_interrupt(self, signum: int, frame: FrameType | None) -> None:
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
        return signal.getsignal(signal.SIGINT) in (self._on_interrupt, signal.default_int_handler)
