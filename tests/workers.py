"""A persistent pool of worker processes, so that multi-process tests are ordinary tests.

`workers(4).run(function, *args)` calls `function(*args)` on 4 ranks of one gloo process group and returns the results
by rank. The processes come from a forkserver with torch and lightning preloaded and stay for the next run; after a
failure, a hang, or `RUNS_PER_POOL` runs they are replaced.

    parent                          rank r (not daemonic: DataLoader workers may be started)
    run(): pickle(function, args) -> barrier, function(*args) in a fresh directory, barrier
           result or traceback   <- restore environment and directory, wait for the next call

What it does not do: launch through Lightning or torchrun (the ranks look as if torchrun had started them), several
machines, other backends than gloo.
"""

from __future__ import annotations

import faulthandler
import gc
import io
import multiprocessing
import os
import pickle
import re
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import TracebackType
from typing import Self, TypeVar

import torch
import torch.distributed as dist
from lightning.fabric.utilities.rank_zero import rank_zero_only
from lightning.pytorch.trainer.connectors.signal_connector import _SignalConnector

from lightning_3d.torch_internals.process_groups import one_gloo_thread

Result = TypeVar("Result")

DEFAULT_TIMEOUT = 120.0
"""Seconds that one run may take."""

GRACE = 3.0
"""Seconds that the other ranks get to report after the first one failed, and a process to end."""

DUMP_TIMEOUT = 10.0
"""Seconds that a busy machine may take until the stacks of unfinished ranks are written."""

RUNS_PER_POOL = 64
"""Runs after which fresh processes take over: process groups and caches of earlier runs pile up, and a new pool takes
half a second."""

LOSS_CODE = 3000
"""Characters of a failed rank's output that the error shows."""

_EXTENSIONS = re.compile(r"^Extension modules: .*$", re.MULTILINE)
"""What faulthandler lists after the stacks, among it each kernel that was compiled, which would fill the tail."""

CRASHES = {signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGSEGV}
"""Signals at which a rank writes its stacks."""

PRELOAD = (
    "lightning",
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.fsdp",
    "torch.distributed.pipelining",
    "torch.distributed.tensor.parallel",
    "torchmetrics.classification",
    "lightning_3d.strategy",
)
"""What the forkserver imports once for all workers, besides the modules of tests that the test process has."""

BEHIND = {"transformers": "transformers.modeling_utils"}
"""What a package loads late that most tests with it need; imported, too, where the test process has the package."""


class WorkerError(RuntimeError):
    """Ranks of one run failed, died or did not finish; the message holds every distinct traceback."""

    def __init__(self, message: str, failures: dict[int, str]) -> None:
        super().__init__(message)
        self.failures = failures
        """Traceback, or what became of the process, by rank; ranks that returned are absent."""


@dataclass(frozen=True, kw_only=True)
class _Seat:
    """Where one worker sits: its rank and the files that it shares with the parent."""

    rank: int
    world_size: int
    store: Path
    log: Path
    port: int


@dataclass(frozen=True, kw_only=True)
class _Success:
    payload: bytes


@dataclass(frozen=True, kw_only=True)
class _Failure:
    report: str


# ---------------------------------------------------------------------------------------------------- worker's side


def _torchrun_environment(seat: _Seat) -> dict[str, str]:
    """The variables that `torchrun --standalone` sets, by which Lightning recognises its TorchElasticEnvironment."""
    rank, size = str(seat.rank), str(seat.world_size)
    return {
        "RANK": rank,
        "LOCAL_RANK": rank,
        "ROLE_RANK": rank,
        "GROUP_RANK": "0",
        "WORLD_SIZE": size,
        "LOCAL_WORLD_SIZE": size,
        "ROLE_WORLD_SIZE": size,
        "GROUP_WORLD_SIZE": "1",
        "ROLE_NAME": "default",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(seat.port),
        "TORCHELASTIC_RUN_ID": "test",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0",
        "OMP_NUM_THREADS": "1",
    }


def _die_with_parent() -> None:
    """Block until the test process is gone, then end this worker and whatever it started."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os.killpg(0, signal.SIGKILL)


def _work(seat: _Seat, connection: Connection) -> None:
    """Main function of a worker process: serve calls until the parent closes the connection."""
    os.setpgid(0, 0)
    log = os.open(seat.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    threading.Thread(target=_die_with_parent, daemon=True).start()
    os.environ.update(_torchrun_environment(seat))
    torch.set_num_threads(1)
    rank_zero_only.rank = seat.rank  # type: ignore[attr-defined]  # Lightning hangs it on the function
    store = dist.FileStore(str(seat.store), seat.world_size)  # type: ignore[attr-defined]  # public, not in __all__
    with one_gloo_thread():
        dist.init_process_group("gloo", store=store, rank=seat.rank, world_size=seat.world_size)
    # A Trainer puts Python's handlers back at its end, in the place of faulthandler's.
    _SignalConnector._valid_signals = staticmethod(lambda: signal.valid_signals() - CRASHES)  # type: ignore[method-assign]
    gc.freeze()  # what was imported so far need not be searched after every run
    while True:
        try:
            request = connection.recv_bytes()
        except EOFError:
            return
        os.ftruncate(log, 0)
        connection.send(_answer(request))


def _answer(request: bytes) -> _Success | _Failure:
    faulthandler.enable(file=2, all_threads=True)  # stacks of a rank that crashes
    faulthandler.unregister(signal.SIGUSR1)  # a Trainer of an earlier run has put the default handler back
    faulthandler.register(signal.SIGUSR1, file=2, all_threads=True)
    environment, directory, num_modules = dict(os.environ), os.getcwd(), len(sys.modules)
    rank = rank_zero_only.rank  # type: ignore[attr-defined]
    for name in ("PL_GLOBAL_SEED", "PL_SEED_WORKERS"):  # what the process of the tests seeded is no seed of this run
        os.environ.pop(name, None)
    try:
        workspace, function, args = pickle.loads(request)
        os.chdir(workspace)
        dist.barrier()
        result = function(*args)
        dist.barrier()
        buffer = io.BytesIO()
        torch.save(result, buffer)
        return _Success(payload=buffer.getvalue())
    except BaseException:  # SystemExit and torch's BaseExceptions must be reported, too
        return _Failure(report=traceback.format_exc())
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os.chdir(directory)
        os.environ.clear()
        os.environ.update(environment)
        rank_zero_only.rank = rank  # type: ignore[attr-defined]
        _collect(num_modules)


def _collect(num_modules: int) -> None:
    """Collect what a run has left. What it imported is set aside for good: searching it would take each later
    collection a third of a second, and there are several in a run.
    """
    gc.collect()
    if len(sys.modules) > num_modules:
        gc.freeze()


# ---------------------------------------------------------------------------------------------------- parent's side


def _preload() -> list[str]:
    tests = [name for name in sys.modules if name.startswith(("tests.test_", "tests.law."))]
    return [*PRELOAD, *(module for package, module in BEHIND.items() if package in sys.modules), *tests]


class _Crew:
    """The live processes of one pool; never reused after a failure."""

    def __init__(self, size: int) -> None:
        self.directory = Path(tempfile.mkdtemp(prefix=f"workers{size}-"))
        self.num_runs = 0
        self._connections: list[Connection] = []
        self._processes: list[BaseProcess] = []
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(_preload())
        port = free_port()
        for rank in range(size):
            seat = _Seat(rank=rank, world_size=size, store=self.directory / "store", log=self.log(rank), port=port)
            ours, theirs = context.Pipe()
            process = context.Process(target=_work, args=(seat, theirs), name=f"worker {rank} of {size}")
            process.start()
            theirs.close()
            self._connections.append(ours)
            self._processes.append(process)

    def log(self, rank: int) -> Path:
        return self.directory / f"rank{rank}.log"

    def call(self, request: bytes, timeout: float, grace: float) -> dict[int, _Success | _Failure]:
        """Send the request to all ranks; returns the answers by rank, without the ranks that gave none in time."""
        self.num_runs += 1
        answers: dict[int, _Success | _Failure] = {}
        for rank, connection in enumerate(self._connections):
            try:
                connection.send_bytes(request)
            except (BrokenPipeError, ConnectionResetError):
                answers[rank] = self._obituary(rank)
        deadline = time.monotonic() + timeout
        while len(answers) < len(self._connections):
            if any(isinstance(answer, _Failure) for answer in answers.values()):
                deadline = min(deadline, time.monotonic() + grace)
            waiting = {self._connections[rank]: rank for rank in range(len(self._connections)) if rank not in answers}
            ready = wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            for connection, rank in waiting.items():
                if connection in ready:
                    answers[rank] = self._receive(rank)
        return answers

    def _receive(self, rank: int) -> _Success | _Failure:
        try:
            answer = self._connections[rank].recv()
        except (EOFError, ConnectionResetError):
            return self._obituary(rank)
        assert isinstance(answer, _Success | _Failure)
        return answer

    def _obituary(self, rank: int) -> _Failure:
        process = self._processes[rank]
        process.join(timeout=GRACE)
        code = process.exitcode
        if code is None:
            return _Failure(report="The process closed its connection and is still running.\n")
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"
        return _Failure(report=f"The process {how}.\n")

    def dump_stacks(self, ranks: list[int]) -> None:
        """Make these ranks write the stacks of all their threads to their logs, and wait until they are there."""
        before = {rank: len(self.output(rank)) for rank in ranks if self._processes[rank].is_alive()}
        for rank in before:
            os.kill(self._processes[rank].pid or 0, signal.SIGUSR1)
        deadline = time.monotonic() + DUMP_TIMEOUT
        now: dict[int, int] = {}
        while time.monotonic() < deadline:
            time.sleep(0.2)
            then, now = now, {rank: len(self.output(rank)) for rank in before}
            if all(before[rank] < now[rank] == then.get(rank) for rank in before):
                return

    def output(self, rank: int) -> str:
        written = self.log(rank).read_text(errors="replace") if self.log(rank).exists() else ""
        return _EXTENSIONS.sub("", written)

    def kill(self) -> None:
        """End the processes and whatever they started, and remove their files."""
        for process in self._processes:
            assert process.pid is not None
            try:
                os.killpg(process.pid, signal.SIGKILL)
            except ProcessLookupError:  # gone, or not yet the leader of its own group
                process.kill()
        for process in self._processes:
            process.join()
        for connection in self._connections:
            connection.close()
        shutil.rmtree(self.directory, ignore_errors=True)


class WorkerPool:
    """`size` ranks that run functions together; see the module."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._crew: _Crew | None = None

    def run(
        self, function: Callable[..., Result], *args: object, timeout: float = DEFAULT_TIMEOUT, grace: float = GRACE
    ) -> list[Result]:
        """Call `function(*args)` on every rank.

        Args:
            function: A module-level function (pickled by reference).
            *args: Pickled to every rank.
            timeout: Seconds after which the run counts as hanging.
            grace: Seconds that the other ranks get to report after the first one failed.

        Returns:
            The results by rank, with all tensors on the CPU. The working directory of the run is the same for all
            ranks, empty at the start and removed at the end.

        Raises:
            WorkerError: If any rank raised, died or did not finish. The processes are then replaced.
        """
        if self._crew is not None and self._crew.num_runs >= RUNS_PER_POOL:
            self.close()
        crew = self._crew = self._crew or _Crew(self.size)
        finished = False
        with tempfile.TemporaryDirectory(prefix="run-", dir=crew.directory, ignore_cleanup_errors=True) as workspace:
            try:
                answers = crew.call(pickle.dumps((workspace, function, args)), timeout, grace)
                finished = sum(isinstance(answer, _Success) for answer in answers.values()) == self.size
                if not finished:
                    raise _error(crew, answers, self.size, _name_of(function), timeout)
            finally:
                if not finished:  # an interrupt (Ctrl-C, pytest-timeout) leaves ranks in the middle of the run, too
                    self.close()
        payloads = [answer.payload for _, answer in sorted(answers.items()) if isinstance(answer, _Success)]
        return [torch.load(io.BytesIO(payload), map_location="cpu", weights_only=False) for payload in payloads]

    def close(self) -> None:
        """End the processes; the next run starts new ones."""
        if self._crew is not None:
            self._crew.kill()
            self._crew = None


class WorkerPools:
    """One pool per size, started when first used: `with WorkerPools() as workers: workers(4).run(function)`."""

    def __init__(self) -> None:
        self._pools: dict[int, WorkerPool] = {}

    def __call__(self, size: int) -> WorkerPool:
        return self._pools.setdefault(size, WorkerPool(size))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        for pool in self._pools.values():
            pool.close()


def _name_of(function: Callable[..., object]) -> str:
    named = function.func if isinstance(function, partial) else function
    return f"{named.__module__}.{named.__qualname__}"


def _error(crew: _Crew, answers: dict[int, _Success | _Failure], size: int, what: str, timeout: float) -> WorkerError:
    failures = {rank: answer.report for rank, answer in answers.items() if isinstance(answer, _Failure)}
    unfinished = [rank for rank in range(size) if rank not in answers]
    crew.dump_stacks(unfinished)
    limit = "soon after the first failure" if failures else f"after {timeout:g} s"
    ranks_of: dict[str, list[int]] = {}
    for rank, report in sorted(failures.items()):
        ranks_of.setdefault(report, []).append(rank)
    parts = [f"{len(failures) + len(unfinished)} of {size} ranks failed in {what}."]
    parts += [f"--- {_name(ranks)}:\n{report}" for report, ranks in ranks_of.items()]
    parts += [f"--- {_name(unfinished)}: not finished {limit}; stacks below."] if unfinished else []
    shown = sorted({ranks[0] for ranks in ranks_of.values()} | set(unfinished))
    parts += [f"--- output of rank {rank}:\n{crew.output(rank)[-LOSS_CODE:]}" for rank in shown if crew.output(rank)]
    return WorkerError("\n".join(parts), failures | dict.fromkeys(unfinished, f"Not finished {limit}.\n"))


def _name(ranks: list[int]) -> str:
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks))


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])
