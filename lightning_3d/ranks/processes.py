"""Whether a process runs, as its system tells: one that holds Python's lock for long gives no other sign of life."""

from __future__ import annotations

import os
from pathlib import Path

_ENDED = frozenset("ZXx")
_STOPPED = frozenset("Tt")


def this_process() -> str:
    """Names this process for others of its machine; empty where the system does not tell of processes."""
    try:
        return _look(os.getpid())[0]
    except OSError:
        return ""


def machine_of(name: str) -> str:
    """The machine, since it has started, and the namespace of a process of this name."""
    return " ".join(name.split()[:2])


def is_running(name: str) -> bool:
    """Whether a process runs, that `this_process` gave the name of: and has neither ended nor stopped. False elsewhere.

    A number of a process counts in its namespace, since the machine has started, and until another process takes it.
    """
    _, _, number, *_ = (*name.split(), "", "", "")
    try:
        found, state = _look(int(number))
    except (OSError, ValueError):
        return False
    return found == name and state not in _ENDED | _STOPPED


def _look(number: int) -> tuple[str, str]:
    """The name and the state of a process here."""
    start = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    state, *numbers = Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()
    return f"{start} {os.readlink('/proc/self/ns/pid')} {number} {numbers[18]}", state
