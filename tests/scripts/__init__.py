"""Small programs that tests start as a user would: by python or torchrun, with Lightning starting the other ranks."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
LOSS_CODE = 4000
"""Characters of a program's output that an error shows."""


@dataclass(frozen=True, kw_only=True)
class Ended:
    """A program whose processes have all ended by themselves."""

    returncode: int
    output: str
    """Standard output and error of all its processes."""
    seconds: float
    """From the start until the last process ended."""


def start(
    command: Sequence[str],
    *,
    timeout: float,
    environment: Mapping[str, str] | None = None,
    program: str = sys.executable,
    directory: Path = ROOT,
) -> Ended:
    """Run `python *command` and wait until it and every process that it started have ended.

    Args:
        command: What follows `python`: a script or `-m module`, and arguments.
        timeout: Seconds; then it is killed with every process that it started.
        environment: Variables to set besides the usual ones.
        program: What runs instead of Python.
        directory: Where it runs.

    Raises:
        AssertionError: a process was still running after `timeout`; shows the output.
    """
    inherited = {key: value for key, value in os.environ.items() if key not in ("LOCAL_RANK", "RANK", "WORLD_SIZE")}
    begin = time.monotonic()
    process = subprocess.Popen(
        [program, *command],
        cwd=directory,
        env=inherited | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **(environment or {})},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=timeout)  # the pipe ends with the last process that inherited it
    except subprocess.TimeoutExpired:
        _kill_tree(process.pid)
        output, _ = process.communicate()
        raise AssertionError(f"still running after {timeout:g} s: {command}\n{output[-LOSS_CODE:]}") from None
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    return Ended(returncode=process.returncode, output=output, seconds=time.monotonic() - begin)


def _kill_tree(pid: int) -> None:
    """Kill a process and all below it, also those that torchrun has given sessions of their own."""
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGSTOP)  # it starts no others meanwhile
    children = [int(child) for task in Path(f"/proc/{pid}/task").glob("*/children") for child in _words(task)]
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
    for child in children:
        _kill_tree(child)


def _words(path: Path) -> list[str]:
    try:
        return path.read_text().split()
    except (FileNotFoundError, ProcessLookupError):  # the thread has ended
        return []
