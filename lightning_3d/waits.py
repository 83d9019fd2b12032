"""Telling what a long wait is for: nothing for two seconds, then a spinner that goes away, or in logs one line.

Rank 0 alone tells, and only where the Trainer shows a progress bar. In training a line goes above that bar, whose place
on the terminal a spinner would take.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from threading import Event, Thread

from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ProgressBar, RichProgressBar, TQDMProgressBar
from rich.console import Console
from rich.live import Live
from rich.spinner import Spinner

Wait = Callable[[str], AbstractContextManager[None]]
"""Takes what is waited for; the wait is as long as the context."""

_PATIENCE = 2.0  # seconds before anything is shown
_BETWEEN_FRAMES = 0.1  # seconds


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


class Waits:
    """Tells of waits, which may be nested: the innermost is named, and the outermost counts for the time.

    Args:
        trainer: Whose progress bar decides whether anybody is told; without one, as in a command, everybody is.
        is_stepping: Whether training runs, and with it the Trainer's progress bar.
    """

    def __init__(self, trainer: Trainer | None = None, is_stepping: Callable[[], bool] = lambda: False) -> None:
        self._trainer, self._is_stepping = trainer, is_stepping
        self._open: list[str] = []  # outermost first
        self._start = 0.0

    @contextmanager
    def __call__(self, what: str) -> Iterator[None]:
        """Tell of a wait."""
        self._open.append(what)
        try:
            with self._told() if len(self._open) == 1 else nullcontext():
                yield
        finally:
            self._open.pop()

    @contextmanager
    def _told(self) -> Iterator[None]:
        bar = None if self._trainer is None else self._trainer.progress_bar_callback
        if self._trainer is not None and (bar is None or _is_disabled(bar) or not self._trainer.is_global_zero):
            yield
            return
        self._start, done = time.monotonic(), Event()
        line = bar.print if bar is not None and self._is_stepping() else None
        thread = Thread(target=self._tell, args=(line, done), name="lightning_3d.waits", daemon=True)
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join()

    def _tell(self, line: Callable[[str], None] | None, done: Event) -> None:
        if done.wait(_PATIENCE):
            return
        console = Console(stderr=True, force_jupyter=False)  # standard output is for results
        if line is not None or not console.is_terminal:
            (line or partial(print, file=sys.stderr, flush=True))(self._text())
            return
        spinner = Spinner("dots", self._text())
        # A process that is forked meanwhile, as a DataLoader's, must not print through a console that is locked.
        live = Live(
            spinner, console=console, transient=True, auto_refresh=False, redirect_stdout=False, redirect_stderr=False
        )
        with live:
            while not done.wait(_BETWEEN_FRAMES):
                spinner.update(text=self._text())
                live.refresh()

    def _text(self) -> str:
        return f"{self._open[-1]} ({time.monotonic() - self._start:.0f} s)"


def _is_disabled(bar: ProgressBar) -> bool:
    return isinstance(bar, RichProgressBar | TQDMProgressBar) and bar.is_disabled
