"""Ranks on the device, and figures that are written to ``benchmarks/results/DEVICE.md`` at the end."""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from tests.gpu import DEVICE
from tests.second_device.ranks import RanksOf, ranks_of
from tests.workers import WorkerPools

RESULTS = Path(__file__).parents[2] / "benchmarks/results" / f"{DEVICE}.md"

_FIGURE = "figure"
"""Property of a test that found one."""


@pytest.fixture(scope="session")
def ranks(workers: WorkerPools) -> Iterator[RanksOf]:
    """``ranks(n).run(function, *args)``."""
    with ranks_of(DEVICE, workers) as ranks:
        yield ranks


@pytest.fixture
def figure(request: pytest.FixtureRequest) -> Callable[[str, str], None]:
    """Note what was measured, and the figure."""
    return lambda what, figure: request.node.user_properties.append((_FIGURE, [what, figure]))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Write the figures down."""
    reports = [report for reports in terminalreporter.stats.values() for report in reports]
    found = [row for report in reports for name, row in getattr(report, "user_properties", ()) if name == _FIGURE]
    if not found:
        return
    name = torch.cuda.get_device_name() if DEVICE == "cuda" else f"the host's memory, {platform.machine()}"
    rows = [f"| {what} | {figure} |" for what, figure in dict(found).items()]
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(
        "\n".join([f"# {DEVICE}: {name}, torch {torch.__version__}", "", "| what | figure |", "|---|---|", *rows, ""])
    )
