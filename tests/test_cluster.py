"""Nodes of a cluster, each an agent of torchrun with a folder of its own, die, and the run goes on."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from tests.scripts import ROOT, Ended, start
from tests.scripts.restarts import BATCHES, EPOCHS, HEARTBEAT_TIMEOUT, main
from tests.workers import WorkerPools

UNTIL_RUNNING = 60.0
"""Seconds from a failure to the first step after it."""

STEPS = range(1, BATCHES * EPOCHS + 1)


@dataclass(frozen=True, kw_only=True)
class Line:
    """A step of one rank."""

    step: int
    world_size: int
    loss: str
    time: float


def lines(folder: Path, rank: int = 0) -> list[Line]:
    """The steps of a rank, in the order in which they ended."""
    found = [line.split() for line in (folder / f"losses-{rank}.txt").read_text().splitlines()]
    return [Line(step=int(a), world_size=int(b), loss=loss, time=float(d)) for a, b, loss, d in found]


class Cluster:
    """Nodes that train in one shared folder.

    Args:
        num_nodes: As ``torchrun --nnodes``.
        deed: What the script does, and the rank and the batch.
    """

    def __init__(
        self, folder: Path, threads: ThreadPoolExecutor, num_nodes: str, deed: list[str], pause: float
    ) -> None:
        self.folder, self._threads, self._pause = folder, threads, pause
        (folder / "shared").mkdir()
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self._launch = ["-m", "torch.distributed.run", f"--nnodes={num_nodes}", "--nproc-per-node=1"]
        self._launch += ["--max-restarts=3", "--rdzv-backend=c10d", f"--rdzv-endpoint=localhost:{port}", "--rdzv-id=a"]
        self._script = [str(ROOT / "tests/scripts/restarts.py"), str(self.shared), "pp 1", *deed]
        self.nodes: list[Future[Ended]] = []

    @property
    def shared(self) -> Path:
        """The folder that all nodes see."""
        return self.folder / "shared"

    def add(self) -> None:
        """Start one more; by their process ids the first one gets rank 0."""
        is_host = not self.nodes
        own = self.folder / f"node{len(self.nodes)}"
        own.mkdir()
        conf = "last_call_timeout=3,keep_alive_interval=1,keep_alive_max_attempt=3"
        command = [*self._launch, f"--rdzv-conf={conf},is_host={int(is_host)}", *self._script]
        environment = {"TMPDIR": str(own), "PAUSE": str(self._pause)}
        self.nodes.append(self._threads.submit(start, command, timeout=240, environment=environment, directory=own))
        time.sleep(2)

    def wait(self) -> list[Ended]:
        """How all nodes ended."""
        wait(self.nodes)
        return [node.result() for node in self.nodes]


@contextmanager
def cluster(
    folder: Path, num_nodes: str, deed: str, rank: int, batch: int, *, pause: float = 0.0, start: int = 2
) -> Iterator[Cluster]:
    """A few nodes that have been started."""
    with ThreadPoolExecutor(4) as threads:
        nodes = Cluster(folder, threads, num_nodes, [deed, str(rank), str(batch)], pause)
        for _ in range(start):
            nodes.add()
        yield nodes


def _seconds_to_first_step(shared: Path) -> float:
    died_at = (shared / "died").stat().st_mtime
    return min(line.time for line in lines(shared) if line.time > died_at + 1.0) - died_at


@pytest.mark.parametrize(
    ("deed", "rank", "named"),
    [
        ("is killed", 1, "rank 1 .*its process ended without raising an exception: by a signal"),
        pytest.param("is killed", 0, "", marks=pytest.mark.cluster),
        pytest.param("is stopped", 1, f"rank 1 .*sign of life for {HEARTBEAT_TIMEOUT} s", marks=pytest.mark.cluster),
        pytest.param("is stopped", 0, f"rank 0 .*sign of life for {HEARTBEAT_TIMEOUT} s", marks=pytest.mark.cluster),
        pytest.param("has a full disk", 0, "File too large", marks=pytest.mark.cluster),
    ],
)
def test_two_nodes_go_on_to_the_bit(workers: WorkerPools, tmp_path: Path, deed: str, rank: int, named: str) -> None:
    whole = tmp_path / "whole"
    whole.mkdir()
    workers(2).run(main, str(whole), "pp 1", "nothing", "0", "0")
    with cluster(tmp_path, "2", deed, rank, 5) as nodes:
        ended = nodes.wait()
    output = "\n".join(end.output for end in ended)
    assert [end.returncode for end in ended] == [0, 0], output
    seconds = _seconds_to_first_step(nodes.shared)
    print(f"{deed}, rank {rank}: {seconds:.1f} s to the first step")
    assert seconds < UNTIL_RUNNING
    expected = {line.step: line.loss for line in lines(whole)}
    found = lines(nodes.shared)
    assert {line.step for line in found} == set(STEPS)
    assert len(found) <= len(STEPS) + 2, "what was not saved yet comes again, and no more"
    assert all(line.loss == expected[line.step] for line in found)
    weights = [torch.load(folder / "last.ckpt")["state_dict"] for folder in (whole, nodes.shared)]
    assert all(torch.equal(value, weights[1][name]) for name, value in weights[0].items())
    import re

    assert re.search(named, output), output
    assert "is implied" in output
