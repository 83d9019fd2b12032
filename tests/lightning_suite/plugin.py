"""A pytest plugin that gives a strategy to every Trainer whose test names none, and writes down how tests ended.

It leaves alone Trainers that name a strategy, an accelerator other than the CPU or several devices.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from lightning.fabric.strategies.launchers import subprocess_script
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import DDPStrategy

from lightning_3d import ThreeDStrategy

ONE_DEVICE = (1, "1", "auto")
CPU = ("auto", "cpu")

STRATEGIES = {"ddp": DDPStrategy, "3d": ThreeDStrategy}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--give-strategy", choices=sorted(STRATEGIES), help="for Trainers without one")
    parser.addoption("--outcomes", type=Path, required=True, help="a JSON file: test id -> [outcome, message]")


def pytest_configure(config: pytest.Config) -> None:
    if (name := config.getoption("--give-strategy")) is not None:
        _give(name)
    config.pluginmanager.register(_Outcomes(config.getoption("--outcomes")))


def _give(name: str) -> None:
    # The thread that watches other processes, of which there are none, ends when its first sleep does, in seconds.
    subprocess_script._ChildProcessObserver.__init__.__defaults__ = (0.05,)
    init = Trainer.__init__

    @functools.wraps(init)
    def with_strategy(self: Trainer, *args: Any, **kwargs: Any) -> None:
        free = kwargs.get("strategy", "auto") == "auto"
        if free and kwargs.get("accelerator", "auto") in CPU and kwargs.get("devices", "auto") in ONE_DEVICE:
            kwargs.update(strategy=name, accelerator="cpu", devices=1)
        init(self, *args, **kwargs)

    Trainer.__init__ = with_strategy  # type: ignore[method-assign]


@pytest.fixture(autouse=True)
def own_process_group() -> Iterator[None]:
    """Let no test go on with the process group of another."""
    yield
    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()


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
        before = self._outcomes[report.nodeid][0]
        if report.when == "setup" or report.failed or (report.when == "call" and before == "passed"):
            self._note(report.nodeid, report.outcome, _message(report))

    def _note(self, test: str, outcome: str, message: str) -> None:
        self._outcomes[test] = (outcome, message)
        self._path.write_text(json.dumps(self._outcomes))


def _message(report: pytest.TestReport) -> str:
    crash = getattr(report.longrepr, "reprcrash", None)
    return "" if report.passed else str(getattr(crash, "message", report.longrepr))
