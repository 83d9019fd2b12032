"""Under torchrun, training goes on by itself after a process has died."""

from __future__ import annotations

import signal
import socket
import time
from concurrent.futures import ThreadPoolExecutor
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
        number, world_size, loss = line.split()
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
def test_one_of_two_nodes_goes_on_alone(tmp_path: Path) -> None:
    """A node is gone for good; torchrun starts the other one again, with half of the replicas."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]

    def node(is_first: int) -> int:
        time.sleep(2 * (1 - is_first))  # by their process ids the first one gets rank 0
        settings = f"--rdzv-conf=last_call_timeout=3,keep_alive_interval=1,keep_alive_max_attempt=3,is_host={is_first}"
        place = ["--rdzv-backend=c10d", f"--rdzv-endpoint=localhost:{port}", "--rdzv-id=nodes", settings]
        launch = ["-m", "torch.distributed.run", "--nnodes=1:2", "--nproc-per-node=1", "--max-restarts=3", *place]
        deed = ["pp 1", "is killed with its agent", "1", "5"]
        return start([*launch, "tests/scripts/restarts.py", str(tmp_path), *deed], timeout=2 * LIMIT).returncode

    with ThreadPoolExecutor(2) as nodes:
        first, second = nodes.map(node, (1, 0))
    assert (first, second) == (0, -signal.SIGKILL)
    losses = _losses(tmp_path)
    assert list(losses) == list(range(1, BATCHES * EPOCHS + 1))
    sizes = {number: [size for size, _ in values] for number, values in losses.items()}
    assert sizes[1] == [2]
    alone = [number for number in sizes if sizes[number][-1] == 1]
    assert alone == list(range(min(alone), BATCHES * EPOCHS + 1))
    assert 5 <= min(alone) <= 6, "the batch that was not saved yet comes again"


@pytest.mark.matrix
def test_fewer_processes_go_on_in_another_layout(tmp_path: Path) -> None:
    """One of two processes is gone for good; the other goes on as ``data_parallel_size="auto"`` asks for."""
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--max-restarts=0"]
    ended = start([*launch, "tests/scripts/restarts.py", str(tmp_path), "pp 1", "is killed", "1", "8"], timeout=LIMIT)
    assert ended.returncode != 0
    before = _losses(tmp_path)
    _train(tmp_path, ["--nproc-per-node=1"], ["nothing", "0", "0"], "pp 1")
    after = _losses(tmp_path)
    assert list(after) == list(range(1, BATCHES * EPOCHS + 1))
    resumed = {number: values[-1] for number, values in after.items() if values[-1][0] == 1}
    assert list(resumed) == list(range(min(resumed), BATCHES * EPOCHS + 1))
    assert 8 <= min(resumed) <= 9  # the batch that was not saved yet comes again
    assert all(before[number] == after[number] for number in range(1, min(resumed)))
