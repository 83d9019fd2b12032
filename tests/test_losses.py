"""The loss of a batch is one process's, whatever it is: not only means over samples."""

from __future__ import annotations

from functools import cache, partial

import pytest

from tests.losses import LOSSES, LossNet, labelled
from tests.parity import Job, Layout, ReferenceRun, assert_parity, run_layout, run_reference
from tests.workers import WorkerPools

LAYOUTS = [
    Layout(pp=2, num_microbatches=4),
    Layout(pp=2, dp=2, num_microbatches=2),
    Layout(pp=2, dp=2, num_microbatches=3, zero=3),
    Layout(pp=2, tp=2, num_microbatches=3),
    Layout(pp=2, num_microbatches=4, schedule="interleaved"),
    Layout(pp=2, num_microbatches=4, schedule="interleaved_zero_bubble"),
    Layout(pp=2, num_microbatches=4, schedule="zbv"),
]


@cache
def _reference(loss: str, replicas: int) -> ReferenceRun:
    return run_reference(Job(model=partial(LossNet, loss, replicas), data=labelled))


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("loss", LOSSES)
def test_any_loss(loss: str, layout: Layout, workers: WorkerPools) -> None:

    pass
    result = run_layout(workers, Job(model=partial(LossNet, loss), data=labelled), layout)
    assert_parity(_reference(loss, layout.dp), result)
