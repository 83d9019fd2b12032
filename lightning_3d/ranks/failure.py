"""How a rank failed, in words that every rank can show."""

from __future__ import annotations

import json
import signal
import traceback
from dataclasses import asdict, dataclass
from pathlib import Path

import torch.distributed as dist

ENDED_SILENTLY = (
    "ended without raising an exception: by a signal, which its launcher or the system's log may name, by os._exit, or"
    " by an abort inside of a collective, as where ranks do not call the same ones"
)
"""Said of a process of which nothing else is known."""

_SENDERS = {
    signal.SIGKILL: " (as the system sends it where memory runs out, and schedulers at their limits)",
    signal.SIGABRT: " (as native code aborts, also inside of a collective where ranks do not call the same ones)",
    signal.SIGSEGV: " (a fault in native code)",
}


@dataclass(frozen=True, kw_only=True)
class Failure:
    """The first failure of a run, or one rank's own."""

    rank: int

    place: str
    """The rank, its coordinate in the mesh, and its step."""

    error: str
    """Type, message and source line of the exception; or how the rank ended without one."""

    is_standstill: bool = False
    """Whether no rank has ended, so that no main thread learns of it by itself."""

    def __str__(self) -> str:
        return f"{self.place}: {self.error}"

    def to_text(self) -> str:
        """For the board."""
        return json.dumps(asdict(self))

    @classmethod
    def from_text(cls, text: str) -> Failure:
        """From the board."""
        return cls(**json.loads(text))


def error_text(error: BaseException) -> str:
    """An exception in one line, with the line of code that raised it."""
    message = " ".join(str(error).split())
    name = f"{type(error).__name__}: {message}" if message else type(error).__name__
    return f"{name} ({source_line(error)})"


def source_line(error: BaseException) -> str:
    """The line of code that raised an exception."""
    frames = traceback.extract_tb(error.__traceback__)
    return f"{Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else "nowhere"


def ended_by(signum: signal.Signals) -> str:
    """The signal that ended a process, with what sends it where nobody does by hand."""
    return f"{signum.name}{_SENDERS.get(signum, '')}"


def is_lost_connection(error: BaseException) -> bool:
    """Whether a collective failed because another rank is gone, which says nothing of the cause."""
    if isinstance(error, dist.DistError):
        return True
    return isinstance(error, RuntimeError) and "/gloo/" in str(error)
