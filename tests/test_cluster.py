"""Nodes of a cluster, each an agent of torchrun with a folder of its own, die, and the run goes on."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from pathlib import Path

import pytest
import torch

from tests.scripts import ROOT, Ended, start
from tests.scripts.restarts import BATCHES, EPOCHS, main
from tests.scripts.restarts import HEARTBEAT_TIMEOUT as TIMEOUT
from tests.workers import WorkerPools, free_port

UNTIL_RUNNING = 60.0
"""Seconds from the end of a process to the first step after it."""

UNTIL_ENDED = 2 * TIMEOUT + 10
"""Seconds until those have ended that stand still: until they are named, others end, and torchrun waits no longer."""

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
        self._launch = ["-m", "torch.distributed.run", f"--nnodes={num_nodes}", "--nproc-per-node=1"]
        self._launch += ["--max-restarts=3", "--shutdown-timeout=10", "--rdzv-backend=c10d", "--rdzv-id=a"]
        self._script = [str(ROOT / "tests/scripts/restarts.py"), str(self.shared), "pp 1", *deed]
        self._endpoint = ""
        self.nodes: list[Future[Ended]] = []

    @property
    def shared(self) -> Path:
        """The folder that all nodes see."""
        return self.folder / "shared"

    def add(self, prefix: list[str] | None = None, address: str = "127.0.0.1", interface: str = "lo") -> None:
        """Start one more; by their process ids the first one gets rank 0.

        Args:
            prefix: What starts it, if not this process.
            address: Its own.
            interface: Of its network.
        """
        own = self.folder / f"node{len(self.nodes)}"
        own.mkdir()
        if not self.nodes:
            self._endpoint = f"{address}:{free_port()}"
        conf = f"last_call_timeout=3,keep_alive_interval=1,keep_alive_max_attempt=3,is_host={int(not self.nodes)}"
        rendezvous = [f"--rdzv-endpoint={self._endpoint}", f"--rdzv-conf={conf}", f"--local-addr={address}"]
        program, *command = [*(prefix or []), sys.executable, *self._launch, *rendezvous, *self._script]
        environment = {**self._environment, "TMPDIR": str(own), "GLOO_SOCKET_IFNAME": interface}
        started = partial(start, command, timeout=240, environment=environment, directory=own, program=program)
        self.nodes.append(self._threads.submit(started))
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
    assert seconds < UNTIL_RUNNING + UNTIL_ENDED * (deed == "is stopped")
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


@pytest.fixture
def link() -> Iterator[list[str]]:
    """Two network namespaces with a link between them, 10.97.0.1 and 10.97.0.2; gives their names."""
    names = ["lightning3d_0", "lightning3d_1"]
    if subprocess.run(["ip", "netns", "add", names[0]], capture_output=True).returncode != 0:
        pytest.skip("network namespaces are not permitted")
    try:
        _ip(f"netns add {names[1]}")
        _ip(f"link add link0 netns {names[0]} type veth peer name link1 netns {names[1]}")
        for number, name in enumerate(names):
            _ip(f"-n {name} addr add 10.97.0.{number + 1}/24 dev link{number}")
            _ip(f"-n {name} link set link{number} up")
            _ip(f"-n {name} link set lo up")
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], check=False)


def _ip(arguments: str) -> None:
    subprocess.run(["ip", *arguments.split()], check=True)


@pytest.mark.cluster
def test_a_node_that_the_network_loses_ends_and_the_other_goes_on(link: list[str], tmp_path: Path) -> None:
    with cluster(tmp_path, "1:2", ["nothing", "0", "0"], pause=1.0, start=0) as nodes:
        for number, name in enumerate(link):
            nodes.add(prefix=["ip", "netns", "exec", name], address=f"10.97.0.{number + 1}", interface=f"link{number}")
        _until(lambda: len(_lines_yet(nodes.shared)) >= 5)
        cut_at = time.time()
        _ip(f"-n {link[0]} link set link0 down")
        first = nodes.nodes[0].result()
        _ip(f"-n {link[0]} link set link0 up")
        second = nodes.wait()[1]
    assert first.returncode == 0, first.output
    assert "rank 1 (pipeline stage 0, data 1, tensor 0), last seen in train step" in first.output
    assert "rank 0 (pipeline stage 0, data 0, tensor 0): its process, or that of the launcher" in second.output
    found = lines(nodes.shared)
    assert [size for size, _ in groupby(line.world_size for line in found)] == [2, 1]
    assert {line.step for line in found} == set(STEPS)
    assert len(found) <= len(STEPS) + 2, "what was not saved yet comes again, and no more"
    seconds = min(line.time for line in found if line.world_size == 1) - cut_at
    print(f"the network is cut: {seconds:.1f} s to the first step of one")
    assert seconds < UNTIL_RUNNING + UNTIL_ENDED
    assert all(line.time < cut_at + UNTIL_ENDED for line in lines(nodes.shared, rank=1)), "it went on alone"


def _lines_yet(shared: Path) -> list[Line]:
    return lines(shared) if (shared / "losses-0.txt").exists() else []


def _until(is_so: Callable[[], bool], seconds: float = 120.0) -> None:
    end = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < end
        time.sleep(0.1)
