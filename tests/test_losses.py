"""The loss of a batch is one process's, whatever it is: not only means over samples.

Under data parallel it is the mean of those of the replicas' batches, as with DDP.
"""

from __future__ import annotations

from functools import partial

import pytest

from tests.losses import LossNet, labelled
from tests.parity import Job, Layout, assert_parity, run_layout
from tests.workers import WorkerPools

REPLICAS = (
    ("ignoring", Layout(pp=2, dp=2, num_microbatches=2)),
    ("contrastive", Layout(pp=2, dp=2, num_microbatches=3, zero=3)),
)


@pytest.mark.parametrize(("loss", "layout"), REPLICAS, ids=str)
def test_replicas_have_the_mean_of_their_losses(loss: str, layout: Layout, workers: WorkerPools) -> None:
    ranks = run_layout(workers, Job(model=partial(LossNet, loss), data=labelled), layout)
    assert_parity(Job(model=partial(LossNet, loss, 2), data=labelled), ranks)
    if loss == "contrastive":
        assert ranks[0].plan is not None
        (told,) = (text for text in ranks[0].plan.losses if text.startswith("training_step: the loss couples samples"))
        assert "data-parallel ranks couples its own samples alone, as under DDP" in told
