"""Under torchrun, training goes on by itself after a process has died."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.scripts import start
from tests.scripts.restarts import BATCHES, EPOCHS, main
from tests.workers import WorkerPools

LIMIT = 110.0
"""Seconds that one program may take."""

Losses = dict[int, list[tuple[int, float]]]
"""By optimizer step, world size and loss, in the order in which they were written."""


def _train(folder: Path, arguments: list[str], deed: list[str], layout: str) -> None:
    launch = ["-m", "torch.distributed.run", "--standalone", *arguments]
    ended = start([*launch, "tests/scripts/restarts.py", str(folder), layout, *deed], timeout=LIMIT)
    assert ended.returncode == 0, ended.output


def _losses(folder: Path, rank: int = 0) -> Losses:
    losses: Losses = {}
    for line in (folder / f"losses-{rank}.txt").read_text().splitlines():
        number, world_size, loss, _ = line.split()
        losses.setdefault(int(number), []).append((int(world_size), float.fromhex(loss)))
    return losses


@pytest.mark.parametrize(
    ("layout", "deed"), [("pp 1", "exits"), pytest.param("pp 2", "is killed", marks=pytest.mark.matrix)]
)
def test_a_group_that_is_started_again_goes_on_to_the_bit(
    workers: WorkerPools, tmp_path: Path, layout: str, deed: str
) -> None:
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    whole.mkdir()
    broken.mkdir()
    workers(2).run(main, str(whole), layout, "nothing", "0", "0")
    _train(broken, ["--nproc-per-node=2", "--max-restarts=1"], [deed, "1", "8"], layout)
    assert (broken / "died").exists()
    expected, found = _losses(whole), _losses(broken)
    assert list(expected) == list(found) == list(range(1, BATCHES * EPOCHS + 1))
    for number, values in found.items():
        assert values == expected[number] * len(values)
    assert len(found[8]) <= 2  # what was not saved yet, again
    assert len(found[1]) == 1


@pytest.mark.matrix
def test_fewer_processes_go_on_in_another_layout(tmp_path: Path) -> None:
    """One of two processes is gone for good; the other goes on as ``data_parallel_size="auto"`` asks for."""
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--max-restarts=0"]
    ended = start([*launch, "tests/scripts/restarts.py", str(tmp_path), "pp 1", "is killed", "1", "8"], timeout=LIMIT)
    assert ended.returncode != 0
    before = _losses(tmp_path)
    _train(tmp_path, ["--nproc-per-node=1"], ["nothing", "0", "0", "last"], "pp 1")
    after = _losses(tmp_path)
    assert list(after) == list(range(1, BATCHES * EPOCHS + 1))
    resumed = {number: values[-1] for number, values in after.items() if values[-1][0] == 1}
    assert list(resumed) == list(range(min(resumed), BATCHES * EPOCHS + 1))
    assert 8 <= min(resumed) <= 9  # the batch that was not saved yet comes again
    assert all(before[number] == after[number] for number in range(1, min(resumed)))
