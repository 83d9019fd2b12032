"""The frames that run, for messages that say where in the user's code."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from types import FrameType

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


def is_of_user(frame: FrameType) -> bool:
    """Whether a frame runs code outside torch and this package."""
    return package_of(frame) not in _OWN


def place_of(frame: FrameType) -> str:
    """File, line and function of a frame."""
    return f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}"
