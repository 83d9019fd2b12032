"""Under torchrun, training goes on by itself after a process has died."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.scripts import start
from tests.scripts.restarts import BATCHES, EPOCHS

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
        number, world_size, loss = line.split()
        losses.setdefault(int(number), []).append((int(world_size), float.fromhex(loss)))
    return losses


@pytest.mark.parametrize(
    ("layout", "deed"), [("pp 1", "exits"), pytest.param("pp 2", "is killed", marks=pytest.mark.matrix)]
)
def test_a_group_that_is_started_again_goes_on_to_the_bit(tmp_path: Path, layout: str, deed: str) -> None:
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    deeds = {whole: ["nothing", "0", "0"], broken: [deed, "1", "8"]}
    for folder in deeds:
        folder.mkdir()
    with ThreadPoolExecutor(2) as programs:  # which wait a lot
        launch = ["--nproc-per-node=2", "--max-restarts=1"]
        for run in [programs.submit(_train, folder, launch, deeds[folder], layout) for folder in deeds]:
            run.result()
    assert (broken / "died").exists()
    expected, found = _losses(whole), _losses(broken)
    assert list(expected) == list(found) == list(range(1, BATCHES * EPOCHS + 1))
    for number, values in found.items():
        assert values == expected[number] * len(values)
    assert len(found[8]) <= 2  # what was not saved yet, again
    assert len(found[1]) == 1
