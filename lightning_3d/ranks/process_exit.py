"""The end of a process, which destroys its process groups while Python can still serve their threads.

A thread of gloo lets go of a collective's tensors after the result has been taken. Where that falls into the shutdown
of the interpreter, the thread can't have Python's lock and aborts the process ("terminate called without an active
exception").
"""

from __future__ import annotations

import atexit
import time
from collections.abc import Callable
from functools import cache

import torch.distributed as dist

from lightning_3d.torch_internals.process_groups import abort_process_group

_UNTIL_LEFT = 2.0  # seconds that rank 0, which may keep the board, stays for others that end
_UNTIL_RELEASED = 0.05  # seconds in which threads of gloo let go of their last tensors, which takes microseconds

_aborts: list[bool] = []  # not empty once ranks have failed
_have_left: list[Callable[[], bool]] = []  # tells it of the last run


@cache  # once per process
def end_in_order() -> None:
    """Let the process destroy its groups when it ends, after the others have left the last run."""
    atexit.register(destroy_groups)
    atexit.register(_stay)


def stay_until(have_left: Callable[[], bool]) -> None:
    """Let the end of the process wait for this, a short time."""
    _have_left[:] = [have_left]


def abort_at_end() -> None:
    """Let the end of the process not wait for ranks that have failed, with which NCCL would end its groups together."""
    _aborts.append(True)


def _stay() -> None:
    end = time.monotonic() + _UNTIL_LEFT
    while time.monotonic() < end and not all(have_left() for have_left in _have_left):
        time.sleep(0.01)


def destroy_groups() -> None:
    """Destroy all process groups, and give their threads the time to end."""
    if dist.is_initialized() and _aborts and dist.get_backend() != "gloo":  # which waits for nobody, and has no abort
        abort_process_group()
    elif dist.is_initialized():
        dist.destroy_process_group()
    time.sleep(_UNTIL_RELEASED)
