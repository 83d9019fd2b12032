"""Nodes of a cluster, each an agent of torchrun with a folder of its own, die, and the run goes on."""

from __future__ import annotations

import re
import signal
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

import pytest
import torch

from tests.scripts import ROOT, Ended, start
from tests.scripts.restarts import BATCHES, EPOCHS, main
from tests.scripts.restarts import HEARTBEAT_TIMEOUT as TIMEOUT
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
    """

    def __init__(
        self,
        folder: Path,
        threads: ThreadPoolExecutor,
        num_nodes: str,
        deed: list[str],
        environment: dict[str, str],
    ) -> None:
        self.folder, self._threads, self._environment = folder, threads, environment
        (folder / "shared").mkdir()
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self._launch = ["-m", "torch.distributed.run", f"--nnodes={num_nodes}", "--nproc-per-node=1"]
        self._launch += [
            "--max-restarts=3",
            "--shutdown-timeout=10",
            "--rdzv-backend=c10d",
            f"--rdzv-endpoint=localhost:{port}",
            "--rdzv-id=a",
        ]
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
        environment = {**self._environment, "TMPDIR": str(own)}
        self.nodes.append(self._threads.submit(start, command, timeout=240, environment=environment, directory=own))
        time.sleep(2)

    def wait(self) -> list[Ended]:
        """How all nodes ended."""
        wait(self.nodes)
        return [node.result() for node in self.nodes]


@contextmanager
def cluster(
    folder: Path, num_nodes: str, deed: list[str], *, pause: float = 0.0, start: int = 2, shares_store: bool = False
) -> Iterator[Cluster]:
    """A few nodes that have been started.

    Args:
        deed: What the script does, its rank and its batch.
        pause: Seconds before each batch.
        start: How many.
        shares_store: Whether all starts share one store, as is torchrun's default.
    """
    environment = {"PAUSE": str(pause), "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": str(int(not shares_store))}
    with ThreadPoolExecutor(4) as threads:
        nodes = Cluster(folder, threads, num_nodes, deed, environment)
        for _ in range(start):
            nodes.add()
        yield nodes


def _seconds_to_first_step(shared: Path) -> float:
    died_at = (shared / "died").stat().st_mtime
    return min(line.time for line in lines(shared) if line.time > died_at + 1.0) - died_at


@pytest.mark.parametrize(
    ("deed", "rank", "shares_store", "named"),
    [
        ("is killed", 1, True, "exitcode: -9"),
        pytest.param("is killed", 0, False, "exitcode: -9", marks=pytest.mark.cluster),
        pytest.param("is stopped", 1, True, f"rank 1 .*sign of life for {TIMEOUT} s", marks=pytest.mark.cluster),
        pytest.param("is stopped", 0, False, f"sign of life for {TIMEOUT} s", marks=pytest.mark.cluster),
        pytest.param("has a full disk", 0, False, "File too large", marks=pytest.mark.cluster),
    ],
)
def test_two_nodes_go_on_to_the_bit(
    workers: WorkerPools, tmp_path: Path, deed: str, rank: int, shares_store: bool, named: str
) -> None:
    whole = tmp_path / "whole"
    whole.mkdir()
    workers(2).run(main, str(whole), "pp 1", "nothing", "0", "0")
    with cluster(tmp_path, "2", [deed, str(rank), "5"], shares_store=shares_store) as nodes:
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
    assert re.search(named, output), output
    assert 'ckpt_path="last" is implied' in output


@pytest.mark.cluster
def test_a_node_dies_and_another_takes_its_place(tmp_path: Path) -> None:
    """Of three nodes the last one loses its agent; two go on, until a new one comes."""
    with cluster(tmp_path, "1:3", ["loses its agent", "2", "5"], pause=2.0, start=3) as nodes:
        _until(lambda: any(line.world_size == 2 for line in _lines_yet(nodes.shared)))
        nodes.add()
        ended = nodes.wait()
    output = "\n".join(end.output for end in ended)
    assert [end.returncode for end in ended] == [0, 0, -signal.SIGKILL, 0], output
    found = lines(nodes.shared)
    assert [size for size, _ in groupby(line.world_size for line in found)] == [3, 2, 3], output
    assert {line.step for line in found} == set(STEPS)
    assert len(found) <= len(STEPS) + 4, "what was not saved yet comes again, and no more"
    died_at = (nodes.shared / "died").stat().st_mtime
    of_third = [line.time for line in lines(nodes.shared, rank=2)]
    joined_at = next(line.time for line in found if line.world_size == 3 and line.time > died_at + 10)
    assert not [time for time in of_third if died_at + 1 < time < joined_at - 5], "it went on without its agent"
    print(f"a node dies: {_seconds_to_first_step(nodes.shared):.1f} s to the first step of two")


def _lines_yet(shared: Path) -> list[Line]:
    return lines(shared) if (shared / "losses-0.txt").exists() else []


def _until(is_so: Callable[[], bool], seconds: float = 120.0) -> None:
    end = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < end
        time.sleep(0.1)
