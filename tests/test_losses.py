"""The loss of a batch is one process's, whatever it is: not only means over samples.

Under data parallel it is the mean of those of the replicas' batches, as with DDP.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.losses import LossNet, labelled
from tests.parity import Job, Layout, assert_parity, run_layout
from tests.workers import WorkerError, WorkerPools

PIPELINE = Layout(pp=2, num_microbatches=4)
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


class Draws(LossNet):
    """Draws one number for the whole batch with torch, or one for each sample with NumPy."""

    def __init__(self, by: str) -> None:
        super().__init__("triplet")
        self.by = by

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        drawn = torch.rand(()) if self.by == "torch" else torch.from_numpy(np.random.rand(len(batch[0]), 1, 1)).float()
        return self.loss(self(batch[0] * drawn), batch[1])


@pytest.mark.parametrize(
    ("by", "message"),
    [
        ("torch", "draws random numbers in the step, for each microbatch others"),
        ("numpy", "draws other numbers of Python's or NumPy's random generators for the whole batch"),
    ],
)
def test_draws_that_do_not_make_up_the_batch_are_refused_where_samples_are_coupled(
    by: str, message: str, workers: WorkerPools
) -> None:
    job = Job(model=partial(Draws, by), data=labelled, num_val_batches=0)
    with pytest.raises(WorkerError, match=message) as failed:
        run_layout(workers, job, replace(PIPELINE, loss="whole"))
    assert failed.value.failures.keys() == {0, 1}
