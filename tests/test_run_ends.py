"""Runs that fail or get signals: nothing hangs, all ranks end and name the first failure, nothing is half saved."""

from __future__ import annotations

import ctypes
import json
import os
import random
import re
import signal
import socket
import subprocess
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch.distributed as dist

from lightning_3d import ThreeDStrategy
from lightning_3d.ranks.interrupts import Interrupts
from lightning_3d.ranks.processes import is_running, this_process
from tests.models import TinyMLP, features, loader
from tests.parity import QUIET
from tests.scripts import start
from tests.scripts.ends import LAYOUTS, Case, world_size
from tests.workers import WorkerPools


@dataclass(frozen=True)
class End:
    """How the ranks of one case ended, by rank."""

    statuses: Mapping[int, int]
    seconds: Mapping[int, float]
    outputs: Mapping[int, str]
    files: Sequence[str]
    """That callbacks left."""


def run(cases: Sequence[Case], directory: Path) -> list[End]:
    """Run the cases in one program; asserts that every rank of every case ended by itself, but for stopped ones."""
    command = ["tests/scripts/ends.py", str(directory), *(json.dumps(asdict(case)) for case in cases)]
    ended = start(command, timeout=60 + sum(case.limit for case in cases))
    ends = []
    for number, case in enumerate(cases):
        inner, ranks = directory / str(number), range(world_size(case.layout))
        assert (inner / "ends.json").exists(), ended.output
        found = {int(rank): end for rank, end in json.loads((inner / "ends.json").read_text()).items()}
        outputs = {rank: _read(inner / f"output{rank}") for rank in ranks}
        hanging = {rank for rank, end in found.items() if end is None}
        assert hanging == (set(case.ranks) if case.deed == "is stopped" else set()), (case, outputs)
        alive = {rank: end for rank, end in found.items() if end is not None}
        own = {"ends.json", *(f"{kind}{rank}" for kind in ("ready", "output") for rank in ranks)}
        ends.append(
            End(
                statuses={rank: status for rank, (status, _) in alive.items()},
                seconds={rank: seconds for rank, (_, seconds) in alive.items()},
                outputs=outputs,
                files=sorted(file.name for file in inner.iterdir() if file.name not in own),
            )
        )
    return ends


def _read(file: Path) -> str:
    return file.read_text(errors="replace") if file.exists() else ""


ENDED = "ended without raising an exception: by a signal"
NEVER = r"terminate called"
STEPPING: dict[str, Any] = {"num_steps": 200, "pause": 0.05}
SHORT: dict[str, Any] = {"num_steps": 20, "pause": 0.05}


@dataclass(frozen=True, kw_only=True)
class Row:
    """A case, and how it has to end."""

    case: Case
    statuses: Mapping[int, int]
    """Of ranks that end by themselves."""
    says: Mapping[int, Sequence[str]] = field(default_factory=dict)
    """Parts of what ranks print, regular expressions."""
    says_not: Mapping[int, Sequence[str]] = field(default_factory=dict)
    files: str = ""
    """Regular expression for the names that are left, with blanks between them."""


ROWS = {
    "one raises": Row(
        case=Case(layout="pp 2", deed="raises", ranks=[1], callback="on exception"),
        statuses={0: 1, 1: 1},
        says={
            0: [
                r"RankError: rank 0 .* ends, because it waited for rank 1 \(pipeline stage 1, data 0, tensor 0\), train"
                r" step 3: ArithmeticError: the model's own error \(ends.py:",
                "is not saved, which needs all ranks",
            ],
            1: [r"Traceback [\s\S]*\n.*ArithmeticError.*\n.*rank 1 \(.*\), train step 3 failed first"],
        },
        says_not={0: ["direct cause"]},
    ),
    "first raises": Row(
        case=Case(layout="pp 2", deed="raises", ranks=[0]),
        statuses={0: 1, 1: 1},
        says={0: ["failed first"], 1: ["RankError: rank 1 .* it waited for rank 0 .*the model's own error"]},
        says_not={1: ["TCPStore"]},  # rank 0 keeps the store until the others have read why
    ),
    "takes another path than its trace": Row(
        case=Case(layout="pp 2 microbatched", deed="takes another path", ranks=[0, 1]),
        statuses={0: 1, 1: 1},
        says={rank: ["TraceError: .*it called relu.* Or set pipeline.mode=auto or inline"] for rank in range(2)},
    ),
    "makes NaN with detect_anomaly": Row(
        case=Case(layout="pp 2 microbatched", deed="makes NaN", ranks=[1]),
        statuses={0: 1, 1: 1},
        says={
            0: ["RuntimeError: Function 'MulBackward0' returned nan"],
            1: [
                r"\n  File .*ends.py\", line \d+, in forward\n    return y \+ \(0 \* y\).sqrt\(\)",
                "RuntimeError: Function 'MulBackward0' returned nan[^\n]*"
                "\n.*In the backward of microbatch 0 on pipeline stage 1",
            ],
        },
    ),
    "killed inline, of two replicas": Row(
        case=Case(layout="pp 2 x dp 2 inline", deed="is killed in a block", ranks=[3]),
        statuses={0: 1, 1: 1, 2: 1, 3: -9},
        says={rank: [f"RankError: rank {rank} .* it waited for rank 3 .*{ENDED}"] for rank in range(3)},
    ),
    "all raise": Row(
        case=Case(layout="dp 2", deed="raises", ranks=[0, 1], callback="save_on_exception"),
        statuses={0: 1, 1: 1},
        says={0: ["ArithmeticError"]},
        says_not={0: ["RankError"], 1: ["RankError"]},
        files=r"epoch=0-step=3\.ckpt",
    ),
    "first exits": Row(
        case=Case(layout="dp 2", deed="exits", ranks=[0]),
        statuses={0: 3, 1: 1},
        says={1: [f"RankError: rank 1 .* it waited for rank 0 .*{ENDED}"]},
    ),
    "first is stopped": Row(
        case=Case(layout="pp 2", deed="is stopped", ranks=[0], heartbeat_timeout=2),
        statuses={1: 1},
        says={1: ["rank 0 .* has given no sign of life for 2 s"]},
    ),
    "one has fewer batches": Row(
        case=Case(layout="dp 2", deed="has fewer batches", ranks=[1], heartbeat_timeout=4),
        statuses={0: 1, 1: 1},
        says={
            0: [
                r"rank 1 \(pipeline stage 0, data 1, tensor 0\)",
                "it has 4 batches in epoch 0, but rank 0 is in batch 5",
                "limit_train_batches=4",
            ]
        },
    ),
    "one is terminated": Row(  # as Lightning's SIGTERMException ends a program
        case=Case(layout="pp 2", deed="gets SIGTERM", ranks=[1], callback="save_on_exception", **STEPPING),
        statuses={0: 0, 1: 0},
        says_not={0: ["fitted"], 1: ["fitted"]},
        files=r"epoch=\d+-step=\d+\.ckpt",
    ),
    "one is interrupted": Row(  # as Lightning ends after Ctrl+C
        case=Case(layout="dp 2", deed="gets SIGINT", ranks=[1], callback="on exception", **STEPPING),
        statuses={0: 1, 1: 1},
        files=r"on_exception\.ckpt",
    ),
    "interrupted twice": Row(
        case=Case(layout="dp 2", deed="waits for one that loops", ranks=[0, 1], limit=45),
        statuses={0: 1, 1: 1},
        says={rank: [f"rank {rank} .*The run was interrupted."] for rank in range(2)},
    ),
    "all are stopped for a while": Row(
        case=Case(
            layout="dp 2", signal="SIGSTOP", ranks=[0, 1], stopped=5, heartbeat_timeout=3, num_steps=20, pause=0.05
        ),
        statuses={0: 0, 1: 0},
        says={0: ["fitted 20 steps"], 1: ["fitted 20 steps"]},
    ),
    "job is requeued": Row(
        case=Case(layout="pp 2", deed="gets SIGUSR1", ranks=[1], **SHORT),
        statuses={0: 0, 1: 0},
        says={0: ["fitted 20 steps"], 1: ["fitted 20 steps"]},
        files=r"hpc_ckpt_1\.ckpt",
    ),
}

NUM_PROGRAMS = 3
"""Programs that run a part of the cases each, side by side."""


@pytest.fixture(scope="module")
def ends(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, End]:
    shares = [list(ROWS)[first::NUM_PROGRAMS] for first in range(NUM_PROGRAMS)]
    directories = [tmp_path_factory.mktemp("ends") for _ in shares]
    with ThreadPoolExecutor(NUM_PROGRAMS) as threads:  # ranks mostly wait
        found = threads.map(run, ([ROWS[name].case for name in share] for share in shares), directories)
    return {
        name: end
        for share, of_share in zip(shares, found, strict=True)
        for name, end in zip(share, of_share, strict=True)
    }


@pytest.mark.parametrize("name", ROWS)
def test_ranks_end_and_name_the_first_failure(name: str, ends: Mapping[str, End]) -> None:
    row, end = ROWS[name], ends[name]
    assert end.statuses == row.statuses, end.outputs
    for rank, output in end.outputs.items():
        for pattern in row.says.get(rank, ()):
            assert re.search(pattern, output), output
        for pattern in (*row.says_not.get(rank, ()), NEVER):
            assert not re.search(pattern, output), output
    assert re.fullmatch(row.files, " ".join(end.files))
    assert max(end.seconds.values()) < min(end.seconds.values()) + 30


def test_signals_are_read_by_those_who_read_them_before() -> None:
    nobody: Any = None
    interrupts = Interrupts(nobody, nobody, is_ending=lambda: False, is_fit=True)
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    theirs, written = socket.socketpair()  # as of asyncio
    written.setblocking(False)
    with theirs, written:
        try:
            for before in (-1, written.fileno()):
                signal.set_wakeup_fd(before)
                with interrupts.noted():
                    during = signal.set_wakeup_fd(before)
                    signal.set_wakeup_fd(during)
                    assert (during == before) == (before != -1)
                    assert signal.getsignal(signal.SIGINT) is not signal.default_int_handler
                assert signal.set_wakeup_fd(-1) == before
                assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
        finally:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGINT, handler)


@pytest.mark.signals
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_signals_and_exceptions_at_random_moments(layout: str, tmp_path: Path) -> None:
    chance = random.Random(layout)
    cases = []
    for _ in range(100):
        ranks = chance.choice([[0], [1], [0, 1]])
        callback = chance.choice([None, "on exception", "save_on_exception"])
        deed = chance.choice([None, None, "raises"])
        sent = None if deed else chance.choice(["SIGTERM", "SIGINT", "SIGKILL"])
        cases.append(
            Case(
                layout=layout,
                deed=deed,
                at=chance.randrange(60),
                signal=sent,
                delay=chance.uniform(0, 1.5),
                ranks=ranks,
                callback=callback,
                num_steps=60,
                pause=0.02,
                limit=90,
            )
        )
    for case, end in zip(cases, run(cases, tmp_path), strict=True):
        lost = [rank for rank in end.statuses if rank not in case.ranks and end.statuses[rank] == 1]
        if case.deed == "raises" or case.signal == "SIGKILL":
            assert all("RankError" in end.outputs[rank] for rank in lost), (case, end)
        assert all("terminate called" not in output for output in end.outputs.values()), (case, end)


@pytest.mark.signals
@pytest.mark.timeout(3600)
def test_200_fits_end_cleanly(tmp_path: Path) -> None:
    layouts = [layout for layout in LAYOUTS if world_size(layout) == 2]
    cases = [Case(layout=layout, ranks=[], num_steps=2) for layout in layouts * 25]
    ends = run(cases, tmp_path)
    assert sum(status == 0 for end in ends for status in end.statuses.values()) == 200


class Holding(TinyMLP):
    """Holds Python's lock in setup on one rank, as reading a large JSON file does."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.rank = rank

    def setup(self, stage: str) -> None:
        if dist.get_rank() == self.rank:
            ctypes.PyDLL(None).sleep(8)


def held() -> None:
    for rank in (0, 1):
        strategy = ThreeDStrategy(heartbeat_timeout=timedelta(seconds=3))
        trainer = L.Trainer(**QUIET, strategy=strategy, devices=2, max_steps=1, enable_checkpointing=False)
        trainer.fit(Holding(rank), loader(features(8), global_batch_size=4, data_parallel_size=2))
        assert trainer.global_step == 1


def test_a_rank_that_holds_pythons_lock_is_alive(workers: WorkerPools) -> None:
    workers(2).run(held)


def test_a_process_runs_until_it_is_stopped_or_ends() -> None:
    child = subprocess.Popen(["sleep", "60"])
    name = this_process().replace(f" {os.getpid()} ", f" {child.pid} ")
    name = " ".join([*name.split()[:3], Path(f"/proc/{child.pid}/stat").read_text().split()[21]])
    assert is_running(this_process())
    assert is_running(name)
    assert not is_running(name[:-1])
    assert not is_running("")
    child.send_signal(signal.SIGSTOP)
    os.waitpid(child.pid, os.WUNTRACED)
    assert not is_running(name)
    child.kill()
    child.wait()
    assert not is_running(name)
