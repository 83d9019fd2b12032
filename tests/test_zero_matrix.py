"""The one law over every stage of ZeRO, schedule, tensor-parallel size and offload: `make test-matrix`."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from itertools import product
from typing import Any, Literal

import pytest

from tests.parity import Job, Layout, ReferenceRun, assert_parity, run_layout, run_reference
from tests.workers import WorkerPools

pytestmark = pytest.mark.matrix

CLIPPED = Job(gradient_clip_val=0.3, accumulate_grad_batches=2, sees_gradients=False)
SCHEDULES: Any = ("gpipe", "1f1b", "interleaved", "interleaved_zero_bubble", "zbv")


@cache
def _reference() -> ReferenceRun:
    return run_reference(CLIPPED)


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_stages_in_pipelines(workers: WorkerPools, stage: Literal[0, 1, 2, 3], schedule: Any, tp: int) -> None:
    layout = Layout(pp=2, dp=2, tp=tp, zero=stage, schedule=schedule, num_microbatches=2)
    assert_parity(_reference(), run_layout(workers, CLIPPED, layout))


@pytest.mark.parametrize(("dp", "tp"), list(product((2, 4), (1, 2))))
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_stages_without_a_pipeline(workers: WorkerPools, stage: Literal[0, 1, 2, 3], dp: int, tp: int) -> None:
    assert_parity(_reference(), run_layout(workers, CLIPPED, Layout(dp=dp, tp=tp, zero=stage)))


STATES = ({"offload_optimizer": "cpu"}, {"offload_optimizer": "states"})
PARAMETERS = (
    {"offload_optimizer": "cpu", "offload_params": "cpu"},
    {"offload_optimizer": "states", "offload_params": "parameters"},
)
MESHES = (
    Layout(dp=2, tp=2),
    *(Layout(pp=2, dp=2, schedule=schedule, num_microbatches=2) for schedule in SCHEDULES),
    *(Layout(pp=2, dp=2, tp=2, schedule=schedule, num_microbatches=2) for schedule in ("1f1b", "zbv")),
)
OFFLOADED = [
    replace(mesh, zero=stage, zero_settings={**settings, "offload_window": 0.005})
    for stage in (0, 1, 2, 3)
    for settings in (*STATES, *(PARAMETERS if stage == 3 else ()))
    for mesh in MESHES
]


@pytest.mark.parametrize("layout", OFFLOADED, ids=str)
def test_offload(workers: WorkerPools, layout: Layout) -> None:
    assert_parity(_reference(), run_layout(workers, CLIPPED, layout))
