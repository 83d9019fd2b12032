"""The frames that run: where in the user's code, for messages, and whether in the handler of a signal."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterator
from functools import cache, partial
from types import CodeType, FrameType

SourceLine = tuple[str, int, str]
"""File, line and function."""

_OWN = frozenset({"torch", "lightning_3d", "contextlib"})


def with_callers(frame: FrameType | None) -> Iterator[FrameType]:
    """A frame, that which called it, and so on."""
    while frame is not None:
        yield frame
        frame = frame.f_back


def module_of(frame: FrameType) -> str:
    """The name of the module whose code a frame runs."""
    return str(frame.f_globals.get("__name__", ""))


def package_of(frame: FrameType) -> str:
    """The first part of it."""
    return _first_part(module_of(frame))


@cache  # steps ask for it at each call of a block that tensor parallel shards
def _first_part(module: str) -> str:
    return module.partition(".")[0]


def user_lines(frame: FrameType | None) -> list[SourceLine]:
    """The lines outside torch and this package that led to a frame, from the outermost."""
    lines = []
    while frame is not None:
        if _first_part(frame.f_globals.get("__name__", "")) not in _OWN:
            lines.append((frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name))
        frame = frame.f_back
    return lines[::-1]


def line_text(line: SourceLine) -> str:
    """As messages show it."""
    file, number, function = line
    return f"{file}:{number} in {function}"


def is_in_signal_handler() -> bool:
    """Whether the handler of a signal, also one of the user's, has called this code; it may end the process next."""
    handlers = filter(callable, map(signal.getsignal, signal.valid_signals()))
    codes = {_code_of(handler) for handler in handlers}
    return any(frame.f_code in codes for frame in with_callers(sys._getframe()))


def _code_of(function: Callable[..., object]) -> CodeType | None:
    if isinstance(function, partial):
        return _code_of(function.func)
    code: CodeType | None = getattr(function, "__code__", getattr(type(function).__call__, "__code__", None))
    return code
