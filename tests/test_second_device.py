"""Training on a device that is no CPU: everything lies where it should, and the numbers are those of one process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from tests.parity import Job, Layout, LayoutRun, ReferenceRun, assert_parity, run_layout, run_reference
from tests.second_device import build, device
from tests.workers import WorkerPools

pytestmark = pytest.mark.skipif(build.compiler() is None, reason=f"the device is built by {build.COMPILER}, which is missing")


class OnDevice:
    """``pools(n).run(function, *args)`` on ranks that have the second device."""

    def __init__(self, pools: WorkerPools, library: Path) -> None:
        self._pools, self._library = pools, library

    def __call__(self, world_size: int) -> OnDevice:
        self._pool = self._pools(world_size)
        return self

    def run(self, function: Callable[..., Any], *args: Any, timeout: float = 300) -> list[Any]:
        return self._pool.run(_with_device, self._library, function, *args, timeout=timeout)

    def close(self) -> None:
        self._pool.close()


def _with_device(library: Path, function: Callable[..., Any], *args: Any) -> Any:
    if not hasattr(__import__("torch"), device.NAME):
        device.load(library)
        dist.destroy_process_group()  # the strategy makes one with the device's backend
    return function(*args)


@pytest.fixture(scope="module")
def ranks(workers: WorkerPools) -> Iterator[OnDevice]:
    library = build.library()
    for size in (1, 2, 4):
        workers(size).close()
    yield OnDevice(workers, library)
    for size in (1, 2, 4):
        workers(size).close()


JOB = Job(accelerator=device.NAME)
LAYOUTS = {
    "dp2": Layout(dp=2),
    "dp2-zero0": Layout(dp=2, zero=0),
    "zero3": Layout(dp=2, zero=3),
    "pp2": Layout(pp=2),
    "tp2": Layout(tp=2),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_parity(ranks: OnDevice, references: dict[str, ReferenceRun], name: str) -> None:
    if "tiny" not in references:
        references["tiny"] = run_reference(JOB)
    assert_parity(references["tiny"], run_layout(ranks, JOB, LAYOUTS[name]))
