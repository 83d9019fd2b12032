"""A pytest plugin that gives a strategy to every Trainer whose test names none, and writes down how tests ended.

It leaves alone Trainers that name a strategy, an accelerator other than the CPU or several devices. Tests in which
these start processes are skipped.

On several ranks each is a process of pytest that runs the same tests. The ranks meet after every test, in a store of
the runner's, and have its temporary folder in common.
"""

from __future__ import annotations

import ctypes
import functools
import json
import os
import signal
import sys
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from lightning.fabric.plugins.environments.lightning import find_free_network_port
from lightning.fabric.strategies.launchers import subprocess_script
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.strategies.launchers import _MultiProcessingLauncher

from lightning_3d import ThreeDStrategy

ONE_DEVICE = (1, "1", "auto")
CPU = ("auto", "cpu")

STRATEGIES = {"ddp": DDPStrategy, "3d": ThreeDStrategy}

MEETING_TIMEOUT = 30
"""Seconds that a rank waits for others after a test."""

RANKS = pytest.StashKey["_Ranks | None"]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--give-strategy", choices=sorted(STRATEGIES), help="for Trainers without one")
    parser.addoption("--outcomes", type=Path, required=True, help="a JSON file: test id -> [outcome, message]")
    parser.addoption("--leave-out", type=Path, help="a JSON file with ids of tests")
    parser.addoption("--num-ranks", type=int, default=1, help="processes like this one, which is number $LOCAL_RANK")
    parser.addoption("--store", type=int, help="the port of the store in which several ranks meet")


def pytest_configure(config: pytest.Config) -> None:
    if sys.platform == "linux":
        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)  # this process ends with the runner
    num_ranks = config.getoption("--num-ranks")
    config.stash[RANKS] = _Ranks(num_ranks, config.getoption("--store")) if num_ranks > 1 else None
    if (name := config.getoption("--give-strategy")) is not None:
        _give(name, num_ranks)
    _MultiProcessingLauncher.launch = _skip  # type: ignore[method-assign]
    config.pluginmanager.register(_Outcomes(config.getoption("--outcomes")))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    left_out = set(json.loads(config.getoption("--leave-out").read_text()))
    items[:] = [item for item in items if item.nodeid not in left_out]


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Let the exit code be 0 if all tests ran, however they ended."""
    if session.exitstatus in (pytest.ExitCode.TESTS_FAILED, pytest.ExitCode.NO_TESTS_COLLECTED):
        session.exitstatus = pytest.ExitCode.OK


def _give(name: str, num_devices: int) -> None:
    # The thread that watches other processes, of which there are none, ends when its first sleep does, in seconds.
    subprocess_script._ChildProcessObserver.__init__.__defaults__ = (0.05,)
    init = Trainer.__init__

    @functools.wraps(init)
    def with_strategy(self: Trainer, *args: Any, **kwargs: Any) -> None:
        free = kwargs.get("strategy", "auto") == "auto"
        if free and kwargs.get("accelerator", "auto") in CPU and kwargs.get("devices", "auto") in ONE_DEVICE:
            kwargs.update(strategy=name, accelerator="cpu", devices=num_devices)
        init(self, *args, **kwargs)

    Trainer.__init__ = with_strategy  # type: ignore[method-assign]


def _skip(*args: Any, **kwargs: Any) -> None:
    pytest.skip("starts processes, which takes long, for a strategy of its own")


class _Ranks:
    """The ranks that run the same tests."""

    def __init__(self, number: int, port: int) -> None:
        self._rank, self._number = int(os.environ["LOCAL_RANK"]), number
        self._store = dist.TCPStore("localhost", port, is_master=False, timeout=timedelta(seconds=MEETING_TIMEOUT))

    def from_rank_0(self, name: str, value: str) -> str:
        if self._rank == 0:
            self._store.set(name, value)
        return self._store.get(name).decode()

    def meet(self, name: str) -> None:
        """Wait for the others; without them this process can't go on."""
        self._store.set(f"{name}/{self._rank}", "")
        try:
            self._store.wait([f"{name}/{rank}" for rank in range(self._number)])
        except dist.DistStoreError:
            os._exit(1)


@pytest.fixture(autouse=True)
def own_process_group(request: pytest.FixtureRequest) -> Iterator[None]:
    """Let no test go on with the process group, or at the port, of another."""
    ranks, test = request.config.stash[RANKS], request.node.nodeid
    if ranks is not None:
        os.environ["MASTER_PORT"] = ranks.from_rank_0(f"port/{test}", str(find_free_network_port()))
    yield
    if dist.is_initialized():
        dist.destroy_process_group()
    if ranks is not None:
        ranks.meet(f"end/{test}")


@pytest.fixture
def tmp_path(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    ranks = request.config.stash[RANKS]
    return tmp_path if ranks is None else Path(ranks.from_rank_0(f"folder/{request.node.nodeid}", str(tmp_path)))


class _Outcomes:
    """Writes the file anew after every test, so that it also tells of a process that did not come to its end."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._outcomes: dict[str, tuple[str, str]] = {}

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if not report.passed:
            self._note(report.nodeid, report.outcome, str(report.longrepr))

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._note(nodeid, "failed", "the process ended, or was ended, in this test")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" or not report.passed:
            self._note(report.nodeid, report.outcome, _message(report))

    def _note(self, test: str, outcome: str, message: str) -> None:
        self._outcomes[test] = (outcome, message)
        written = self._path.with_suffix(".new")
        written.write_text(json.dumps(self._outcomes))
        written.replace(self._path)


def _message(report: pytest.TestReport) -> str:
    crash = getattr(report.longrepr, "reprcrash", None)
    return "" if report.passed else str(getattr(crash, "message", report.longrepr))
