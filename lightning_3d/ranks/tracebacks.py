"""Printing an exception that ends a run: a few lines in place of every rank's whole traceback.

One rank prints a traceback: the first that failed, or the first of its node where all failed alike. It shows the
user's own frames, with a line in place of those of torch, Lightning and this package. The other ranks print one line or
nothing. The exceptions themselves are left as they are, for whoever catches them, and for debuggers.

With ``LIGHTNING_3D_TRACEBACK=full`` in the environment every rank prints its whole traceback.
"""

from __future__ import annotations

import contextlib
import os
import sys
import traceback
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from traceback import FrameSummary, StackSummary, TracebackException
from types import TracebackType
from typing import Any, Literal

from lightning_3d.errors import ThreeDError

SETTING = "LIGHTNING_3D_TRACEBACK"
"""The environment variable by which every rank prints its whole traceback."""

_PRINTED = "_lightning_3d_printed"  # attribute of an exception: what is printed of it if nobody catches it
_PACKAGES = ("lightning_3d", "lightning", "lightning_fabric", "lightning_utilities", "pytorch_lightning", "torch")
_FOLDED = "<folded>"  # in place of a file's name: so many frames of these packages

Hook = Callable[[type[BaseException], BaseException, TracebackType | None], Any]


@dataclass(eq=False)
class _Printed:
    """How an exception is printed if nobody catches it."""

    how: Literal["frames", "line", "nothing"]
    heading: str = ""


def print_frames_of_user(error: BaseException, heading: str = "") -> None:
    """Let a short traceback be printed if nobody catches the exception, below a heading."""
    _print_only(error, _Printed("frames", heading))


def print_line(error: BaseException, heading: str = "") -> None:
    """Let only the type and message of an exception be printed, after a heading."""
    _print_only(error, _Printed("line", heading))


def print_nothing(error: BaseException) -> None:
    """Let nothing be printed of an exception, as another rank prints the same."""
    _print_only(error, _Printed("nothing"))


def _print_only(error: BaseException, what: _Printed) -> None:
    if os.environ.get(SETTING) == "full":
        return
    vars(error)[_PRINTED] = what
    if not isinstance(sys.excepthook, _ShortHook):  # torch's takes the place of others in init_process_group
        sys.excepthook = _ShortHook(sys.excepthook)
    sys.excepthook.keep_for(what)


class _ShortHook:
    """A ``sys.excepthook`` that leaves other exceptions to the one that was there before. It is there as long as one of
    its own: where somebody catches them, until they are gone.
    """

    def __init__(self, before: Hook) -> None:
        self._before, self._num_kept = before, 0

    def keep_for(self, what: _Printed) -> None:
        """Stay as long as this is there."""
        self._num_kept += 1
        weakref.finalize(what, self._leave).atexit = False

    def _leave(self) -> None:
        self._num_kept -= 1
        if self._num_kept == 0 and sys.excepthook is self:
            sys.excepthook = self._before

    def __call__(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        what = vars(error).get(_PRINTED)
        if what is None or (what.how == "frames" and _is_unexpected(error, trace)):
            self._before(kind, error, trace)
        elif what.how == "frames":
            print(_short(error, what.heading), file=sys.stderr, flush=True)
        elif what.how == "line":
            print(what.heading + "".join(traceback.format_exception_only(error)), end="", file=sys.stderr, flush=True)


def _is_unexpected(error: BaseException, trace: TracebackType | None) -> bool:
    """Whether this package itself went wrong, which a report is to show in full."""
    frames = traceback.extract_tb(trace)
    return bool(frames) and _package(frames[-1]) == "lightning_3d" and not isinstance(error, ThreeDError)


def _short(error: BaseException, heading: str) -> str:
    shown = TracebackException.from_exception(error)
    _fold_frames(shown)
    hint = f"({SETTING}=full in the environment shows all frames, on every rank.)"
    return "\n".join([*([heading] if heading else []), "".join(shown.format()).rstrip(), hint])


def _fold_frames(shown: TracebackException) -> None:
    shown.stack = _FoldedStack(_folded(shown.stack))
    for further in (shown.__cause__, shown.__context__, *(shown.exceptions or ())):
        if further is not None:
            _fold_frames(further)


class _FoldedStack(StackSummary):
    def format_frame_summary(self, frame_summary: FrameSummary, **options: Any) -> str:
        """The lines of a frame."""
        if frame_summary.filename != _FOLDED:
            return super().format_frame_summary(frame_summary, **options)
        frames = "frame" if frame_summary.lineno == 1 else "frames"
        return f"  ... {frame_summary.lineno} {frames} inside {frame_summary.name}\n"


def _folded(stack: StackSummary) -> Iterator[FrameSummary]:
    """The user's frames, and one in place of each run of others."""
    for is_inside, run in groupby(stack, lambda frame: _package(frame) is not None):
        frames = list(run)
        if is_inside:
            names = sorted({package for frame in frames if (package := _package(frame)) not in (None, "contextlib")})
            yield FrameSummary(_FOLDED, len(frames), ", ".join(names) or "contextlib", lookup_line=False)
        else:
            yield from frames


def _package(frame: FrameSummary) -> str | None:
    """The package that a frame is of, if it is one of those that are folded."""
    if frame.filename == contextlib.__file__:  # between frames of others
        return "contextlib"
    parents = Path(frame.filename).parents
    return next((name for name in _PACKAGES if (folder := _folder(name)) is not None and folder in parents), None)


def _folder(package: str) -> Path | None:
    file = getattr(sys.modules.get(package), "__file__", None)
    return None if file is None else Path(file).parent
