"""Offloaded optimizer states and parameters: the same numbers as in one process, from host memory or files."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from tests.models import TinyGPT
from tests.parity import Job, Layout, ReferenceRun, assert_parity, run_layout, run_reference
from tests.workers import WorkerPools

WINDOW = 0.005
"""MiB: smaller than the largest parameters, so that there are several windows and parameters are cut."""

JOB = Job(model=partial(TinyGPT, num_layers=2), gradient_clip_val=0.5, accumulate_grad_batches=2)

_REFERENCES: dict[str, ReferenceRun] = {}


def _reference(job: Job) -> ReferenceRun:
    if str(job) not in _REFERENCES:
        _REFERENCES[str(job)] = run_reference(job)
    return _REFERENCES[str(job)]


def offloaded(layout: Layout, place: str, **settings: Any) -> Layout:
    return replace(layout, zero_settings={"offload_optimizer": place, "offload_window": WINDOW, **settings})


LAYOUTS = (
    *(Layout(dp=2, zero=stage) for stage in (0, 1, 2, 3)),
    Layout(pp=2),
    Layout(tp=2),
    Layout(pp=2, dp=2, zero=1),
)


@pytest.mark.parametrize("place", ["cpu", "states"])
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_offloaded_states(workers: WorkerPools, layout: Layout, place: str) -> None:
    assert_parity(_reference(JOB), run_layout(workers, JOB, offloaded(layout, place)), tolerance=1e-5)


SHARDED = (Layout(zero=3), Layout(dp=2, zero=3), Layout(pp=2, dp=2, zero=3))


@pytest.mark.parametrize("place", ["cpu", "parameters"])
@pytest.mark.parametrize("layout", SHARDED, ids=str)
def test_offloaded_parameters(workers: WorkerPools, layout: Layout, place: str) -> None:
    layout = offloaded(layout, "cpu" if place == "cpu" else "states", offload_params=place)
    assert_parity(_reference(JOB), run_layout(workers, JOB, layout), tolerance=1e-5)
