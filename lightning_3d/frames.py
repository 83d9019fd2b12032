"""The frames that run, for messages that say where in the user's code."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from types import FrameType

Place = tuple[str, int, str]
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


def user_places(frame: FrameType | None) -> list[Place]:
    """Where frames run code outside torch and this package, from the outermost; steps ask at each call of a block."""
    places = []
    while frame is not None:
        if _first_part(frame.f_globals.get("__name__", "")) not in _OWN:
            places.append((frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name))
        frame = frame.f_back
    return places[::-1]


def shown(place: Place) -> str:
    """A place as text."""
    file, line, function = place
    return f"{file}:{line} in {function}"
