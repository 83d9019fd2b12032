"""Fixtures that all tests share."""

from __future__ import annotations

import gc
import os
import random
import shutil
import sys
import tempfile
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from xdist.scheduler import LoadFileScheduling

from tests import minutes
from tests.workers import WorkerPools

torch.set_num_threads(1)  # as on the ranks; small tensors gain nothing from more, and threads that wait for work spin

COMPILED = "TORCHINDUCTOR_CACHE_DIR"

PLANS = "LIGHTNING_3D_CACHE"
"""Environment variable with the folder of what was chosen for tensor parallel: the tests search for each plan."""

REFERENCES = "LAW_REFERENCES"
"""Environment variable with the folder of runs of one process that cases of the law are compared with."""

SEED = "LAW_SEED"
"""Environment variable with the seed of the sample of the law's cases that `make test-matrix` runs."""

FLAKY = "flaky"
"""Property of a test that failed at first: what was wrong."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """Cases of tests/law that are in no cover."""
    parser.addoption("--law", metavar="NAME", help="cases of the law by name: llama*.pp2.bf16.* or *.pp4")


def pytest_configure(config: pytest.Config) -> None:
    """Keep what inductor compiles in a folder of this run, which its processes share.

    A process that is killed while it compiles leaves half a library, which every later run would fail to load. What
    Python compiles is kept, too, as scripts that tests start would each take two seconds for it.
    """
    sys.dont_write_bytecode = False
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    os.environ[PLANS] = ""
    if not hasattr(config, "workerinput"):  # processes that share out the files have it from the one that starts them
        for name, prefix in ((COMPILED, "compiled-"), (REFERENCES, "references-")):
            os.environ[name] = tempfile.mkdtemp(prefix=prefix)
            config.add_cleanup(partial(_forget, name))
        os.environ.setdefault(SEED, str(random.SystemRandom().randrange(10**6)))


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> LoadFileScheduling:
    """Share out files of tests, whose fixtures are made once, and cases of the law one by one, which are last."""
    return _Scheduling(config, log)


class _Scheduling(LoadFileScheduling):
    def _split_scope(self, nodeid: str) -> str:
        is_alone = "::test_law[" in nodeid or nodeid.startswith("tests/gpu/")
        return nodeid if is_alone else super()._split_scope(nodeid)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Cases of the law are last, so that the processes that share out the tests end together."""
    items.sort(key=lambda item: "::test_law[" in item.nodeid)


def pytest_collection_finish() -> None:
    """Leave what was imported out of searches for garbage, of which every run makes some."""
    gc.freeze()


def pytest_report_header() -> str:
    """Name the seed, with which the sample is the same again."""
    return f"{SEED}={os.environ[SEED]}"


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say where the minutes went, and which cases passed only when they were run again."""
    kept = [report for reports in terminalreporter.stats.values() for report in reports]
    reports = [report for report in kept if isinstance(report, pytest.TestReport)]
    for line in minutes.lines(reports):
        terminalreporter.write_line(line)
    for report in reports:
        for name, text in report.user_properties:
            if name == FLAKY and report.when == "call":
                terminalreporter.write_line(f"flaky: {text}", yellow=True)


def _forget(name: str) -> None:
    shutil.rmtree(os.environ.pop(name), ignore_errors=True)


@pytest.fixture(scope="session")
def workers() -> Iterator[WorkerPools]:
    """`workers(n).run(function, *args)`: run a function on n ranks; the processes live as long as the session."""
    with WorkerPools() as pools:
        yield pools
