"""The loss of a batch is one process's, whatever it is: not only means over samples.

Under data parallel it is the mean of those of the replicas' batches, as with DDP.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
from torch import Tensor

from tests.losses import LossNet, labelled
from tests.parity import Job, Layout, assert_parity, run_layout
from tests.workers import WorkerError, WorkerPools

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
        (told,) = (
            text for text in ranks[0].plan.findings.losses if text.startswith("training_step: the loss couples samples")
        )
        assert "data-parallel ranks couples its own samples alone, as under DDP" in told


class Late(LossNet):
    """From some step on has a term that couples samples; before it reads data, or has other flags in each step."""

    def __init__(self, begins: int, *, reads: bool = False) -> None:
        super().__init__("mean")
        self.phase, self.begins, self.reads = "", begins, reads

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.phase = "" if self.reads else str(batch_idx)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        outputs = self(batch[0])
        loss = self.loss(outputs, batch[1])
        if self.reads:
            self.log("error", loss.item())
        if self.global_step >= self.begins:
            loss = loss + outputs["pooled"].mean(0).square().sum()
        self.log("loss", loss, on_step=True, on_epoch=True, sync_dist=True)
        return loss


@pytest.mark.parametrize(("begins", "reads"), [(9, False), (2, True)])
def test_a_term_that_begins_late_is_that_of_the_batch(begins: int, reads: bool, workers: WorkerPools) -> None:
    """After many kinds of steps, or where the step is followed no more, as it has read data of blocks."""
    job = Job(model=partial(Late, begins, reads=reads), data=labelled, steps=begins + 2, num_val_batches=0)
    assert_parity(job, run_layout(workers, job, Layout(pp=2, num_microbatches=2)))


class Unforeseen(Late):
    """Begins by a number of its own, which is not followed past the end of the trace."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.begins = 0 if batch_idx >= 2 else 9


def test_a_term_that_could_not_be_foreseen_runs_inline(workers: WorkerPools) -> None:
    job = Job(model=partial(Unforeseen, 9, reads=True), data=labelled, steps=4, num_val_batches=0)
    ranks = run_layout(workers, job, Layout(pp=2, num_microbatches=2, mode="auto"))
    assert_parity(job, ranks)
    assert ranks[0].plan is not None
    assert "adds to the loss after the step has read data of blocks" in str(ranks[0].plan.inline)


class Mixed(LossNet):
    """Mixes each sample with another before the blocks."""

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        return self.loss(self(batch[0].lerp(batch[0].flip(0), 0.3)), batch[1])


def test_microbatches_refuse_samples_that_meet_before_the_blocks(workers: WorkerPools) -> None:
    job = Job(model=partial(Mixed, "mean"), data=labelled)
    with pytest.raises(WorkerError, match=r"2 of 2 ranks failed[\s\S]*couples samples, as mixup.*what first"):
        run_layout(workers, job, Layout(pp=2, num_microbatches=2, mode="microbatched"))


class InPlace(LossNet):
    """Changes its batch in place, in a step that runs on microbatches and on the whole batch."""

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        outputs = self(batch[0].mul_(0.5))
        loss: Tensor = self.loss(outputs, batch[1]) + outputs["pooled"].mean(0).square().sum()
        self.log("loss", loss, on_step=True, on_epoch=True, sync_dist=True)
        return loss


def test_steps_may_change_their_batch_in_place(workers: WorkerPools) -> None:
    job = Job(model=partial(InPlace, "mean"), data=labelled, num_val_batches=0)
    assert_parity(job, run_layout(workers, job, Layout(pp=2, num_microbatches=2)))
