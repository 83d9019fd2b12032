"""Runs that fail or get signals: nothing hangs, all ranks end and name the first failure, nothing is half saved."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

import pytest

from tests.scripts import start
from tests.scripts.ends import LAYOUTS, WORLD_SIZE, Case


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
        inner = directory / str(number)
        assert (inner / "ends.json").exists(), ended.output
        found = {int(rank): end for rank, end in json.loads((inner / "ends.json").read_text()).items()}
        outputs = {rank: _read(inner / f"output{rank}") for rank in range(WORLD_SIZE)}
        hanging = {rank for rank, end in found.items() if end is None}
        assert hanging == (set(case.ranks) if case.deed == "is stopped" else set()), (case, outputs)
        alive = {rank: end for rank, end in found.items() if end is not None}
        own = {"ends.json", *(f"{kind}{rank}" for kind in ("ready", "output") for rank in range(WORLD_SIZE))}
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


RAISED = "ArithmeticError: the model's own error (ends.py:"
ENDED = "ended without raising an exception: by a signal"
STAGE_1 = r"rank 1 \(pipeline stage 1, data 0, tensor 0\)"

CASES = {
    "one raises": Case(layout="pp 2", deed="raises", ranks=[1], callback="on exception"),
    "all raise": Case(layout="dp 2", deed="raises", ranks=[0, 1], callback="save_on_exception"),
    "first exits": Case(layout="dp 2", deed="exits", ranks=[0]),
    "last is killed": Case(layout="tp 2", deed="is killed", ranks=[1]),
    "one leaves": Case(layout="dp 2", deed="leaves", ranks=[1]),
    "first is stopped": Case(layout="pp 2", deed="is stopped", ranks=[0], heartbeat_timeout=2),
    "one has fewer batches": Case(layout="dp 2", deed="has fewer batches", ranks=[1], heartbeat_timeout=4),
    "one is terminated": Case(
        layout="pp 2", deed="gets SIGTERM", ranks=[1], callback="save_on_exception", num_steps=200, pause=0.05
    ),
    "terminated in the last batch": Case(layout="dp 2", deed="gets SIGTERM", ranks=[1], at=11),
    "one is interrupted": Case(
        layout="dp 2", deed="gets SIGINT", ranks=[1], callback="on exception", num_steps=200, pause=0.05
    ),
    "interrupted in setup": Case(layout="pp 2", signal="SIGINT", ranks=[0, 1], num_steps=200, pause=0.05),
    "all are stopped for a while": Case(
        layout="dp 2", signal="SIGSTOP", ranks=[0, 1], stopped=9, heartbeat_timeout=6, num_steps=60, pause=0.05
    ),
    "job is requeued": Case(layout="pp 2", deed="gets SIGUSR1", ranks=[1], num_steps=40, pause=0.05),
}

NUM_PROGRAMS = 3
"""Programs that run a part of the cases each, side by side."""


@pytest.fixture(scope="module")
def ends(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, End]:
    shares = [list(CASES)[first::NUM_PROGRAMS] for first in range(NUM_PROGRAMS)]
    directories = [tmp_path_factory.mktemp("ends") for _ in shares]
    with ThreadPoolExecutor(NUM_PROGRAMS) as threads:  # ranks mostly wait
        found = threads.map(run, ([CASES[name] for name in share] for share in shares), directories)
    return {
        name: end
        for share, of_share in zip(shares, found, strict=True)
        for name, end in zip(share, of_share, strict=True)
    }


def test_ranks_name_the_one_that_raised_and_save_nothing(ends: Mapping[str, End]) -> None:
    end = ends["one raises"]
    assert end.statuses == {0: 1, 1: 1}
    named = rf"{STAGE_1}, train step 3"
    waited = rf"RankError: rank 0 .* ends, because it waited for {named}: {re.escape(RAISED)}"
    assert re.search(waited, end.outputs[0]), end.outputs[0]
    assert "Traceback" not in end.outputs[0]
    assert re.search(rf"{named} failed first:\nTraceback .*\nArithmeticError", end.outputs[1], re.DOTALL)
    assert "/lightning_3d/" not in end.outputs[1]
    assert end.files == []
    assert "is not saved, which needs all ranks" in end.outputs[0]


def test_ranks_that_raise_alike_save_together(ends: Mapping[str, End]) -> None:
    end = ends["all raise"]
    assert end.statuses == {0: 1, 1: 1}
    assert end.files == ["epoch=0-step=3.ckpt"]
    assert "ArithmeticError" in end.outputs[0]
    assert "Traceback" not in end.outputs[1]  # it prints the same
    assert all("RankError" not in output for output in end.outputs.values())


@pytest.mark.parametrize(
    ("name", "rank", "status", "error"),
    [
        ("first exits", 0, 3, ENDED),
        ("last is killed", 1, -9, ENDED),
        ("one leaves", 1, 4, "SystemExit: 4 (ends.py:"),
    ],
)
def test_ranks_name_the_one_that_ended(name: str, rank: int, status: int, error: str, ends: Mapping[str, End]) -> None:
    end = ends[name]
    assert end.statuses == {rank: status, 1 - rank: 1}
    assert re.search(
        rf"RankError: rank {1 - rank} .* it waited for rank {rank} .*{re.escape(error)}", end.outputs[1 - rank]
    )
    assert end.seconds[1 - rank] < end.seconds[rank] + 30


def test_ranks_do_not_wait_for_one_that_is_stopped(ends: Mapping[str, End]) -> None:
    end = ends["first is stopped"]
    assert end.statuses == {1: 1}
    assert re.search("rank 0 .* has given no sign of life for 2 s", end.outputs[1]), end.outputs[1]


def test_a_rank_with_fewer_batches_is_named(ends: Mapping[str, End]) -> None:
    end = ends["one has fewer batches"]
    assert end.statuses[0] == 1
    assert "rank 1 (pipeline stage 0, data 1, tensor 0)" in end.outputs[0]
    assert "it has 4 batches in epoch 0, but rank 0 is in batch 5" in end.outputs[0]
    assert "limit_train_batches=4" in end.outputs[0]


def test_ranks_that_are_all_stopped_for_a_while_go_on(ends: Mapping[str, End]) -> None:
    end = ends["all are stopped for a while"]
    assert end.statuses == {0: 0, 1: 0}, end.outputs
    assert all("fitted 60 steps" in output for output in end.outputs.values())


def test_a_signal_to_one_rank_ends_all_after_the_same_batch(ends: Mapping[str, End]) -> None:
    end = ends["one is terminated"]
    assert end.statuses == {0: 0, 1: 0}  # as Lightning's SIGTERMException ends a program
    assert all("fitted" not in output for output in end.outputs.values())
    (saved,) = end.files
    assert re.fullmatch(r"epoch=\d+-step=\d+\.ckpt", saved)
    interrupted = ends["one is interrupted"]
    assert interrupted.statuses == {0: 1, 1: 1}  # as Lightning ends after Ctrl+C
    assert interrupted.files == ["on_exception.ckpt"]


def test_an_interrupt_in_setup_ends_all_ranks(ends: Mapping[str, End]) -> None:
    end = ends["interrupted in setup"]
    assert end.statuses == {0: 1, 1: 1}, end.outputs
    assert all("fitted" not in output for output in end.outputs.values())
    assert all("terminate called" not in output for output in end.outputs.values())


def test_a_signal_in_the_last_batch_ends_the_program(ends: Mapping[str, End]) -> None:
    end = ends["terminated in the last batch"]
    assert end.statuses == {0: 0, 1: 0}
    assert all("fitted" not in output for output in end.outputs.values())


def test_slurm_requeues_a_job_that_goes_on(ends: Mapping[str, End]) -> None:
    end = ends["job is requeued"]
    assert end.statuses == {0: 0, 1: 0}, end.outputs
    assert end.files == ["hpc_ckpt_1.ckpt"]
    assert all("fitted 40 steps" in output for output in end.outputs.values())


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
    cases = [Case(layout=layout, ranks=[], num_steps=2) for layout in list(LAYOUTS) * 34][:100]
    ends = run(cases, tmp_path)
    assert sum(status == 0 for end in ends for status in end.statuses.values()) == 200
