"""The loss of a batch is one process's, whatever it is: not only means over samples.

Under data parallel it is the mean of those of the replicas' batches, as with DDP.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial

import lightning as L
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, DistributedSampler, TensorDataset

from tests.losses import CLASSES, IGNORED, LENGTH, LOSSES, LossNet, labelled
from tests.parity import QUIET, Job, Layout, ReferenceRun, assert_parity, run_layout, run_reference
from tests.workers import WorkerError, WorkerPools

PIPELINE = Layout(pp=2, num_microbatches=4)
LAYOUTS = [
    PIPELINE,
    Layout(pp=2, dp=2, num_microbatches=2),
    Layout(pp=2, dp=2, num_microbatches=3, zero=3),
    Layout(pp=2, tp=2, num_microbatches=3),
    *(Layout(pp=2, num_microbatches=4, schedule=s) for s in ("interleaved", "interleaved_zero_bubble", "zbv")),  # type: ignore[arg-type]
]
ALWAYS = [("ignoring", LAYOUTS[1]), ("contrastive", LAYOUTS[2]), ("selected", LAYOUTS[3]), ("divided", LAYOUTS[6])]
"""What every run of the tests has of the matrix."""


@cache
def _reference(model: type[LossNet], loss: str, replicas: int, num_missing: int = 0) -> ReferenceRun:
    return run_reference(Job(model=partial(model, loss, replicas), data=labelled, num_missing=num_missing))


def _case(loss: str, layout: Layout) -> object:
    is_always = layout is PIPELINE or any(name == loss and other is layout for name, other in ALWAYS)
    return pytest.param(loss, layout, id=f"{loss}-{layout}", marks=() if is_always else pytest.mark.matrix)


@pytest.mark.parametrize(("loss", "layout"), [_case(loss, layout) for layout in LAYOUTS for loss in LOSSES])
def test_any_loss(loss: str, layout: Layout, workers: WorkerPools) -> None:
    result = run_layout(workers, Job(model=partial(LossNet, loss), data=labelled), layout)
    assert_parity(_reference(LossNet, loss, layout.dp), result)
    if loss == "contrastive":
        (told,) = (text for text in result.plan.losses if text.startswith("training_step: the loss couples samples"))
        assert ("data-parallel ranks couples its own samples alone, as under DDP" in told) == (layout.dp > 1)


@pytest.mark.parametrize(("loss", "setting"), [("triplet", "whole"), ("ctc", "sum")])
def test_a_loss_that_is_told(loss: str, setting: str, workers: WorkerPools) -> None:
    layout = replace(PIPELINE, loss=setting)  # type: ignore[arg-type]
    result = run_layout(workers, Job(model=partial(LossNet, loss), data=labelled), layout)
    assert_parity(_reference(LossNet, loss, 1), result)


@pytest.mark.parametrize("loss", ["ignoring", "sigmoid_contrastive"])
def test_a_smaller_last_batch(loss: str, workers: WorkerPools) -> None:
    result = run_layout(workers, Job(model=partial(LossNet, loss), data=labelled, num_missing=3), PIPELINE)
    assert_parity(_reference(LossNet, loss, 1, 3), result)


class TwoViews(LossNet):
    """Has two views of each sample in one batch for the encoder, the second one tokens first, and then for the head."""

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> dict[str, Tensor]:
        x, losses, firsts, latent = batch[0], [], [], torch.zeros(0)
        for rank in range(self.replicas):
            views = self(torch.cat([x[rank :: self.replicas], x[rank :: self.replicas].flip(-1)]))["pooled"]
            first, second = self.head(torch.cat([views, views[:, None].roll(1, -1)[:, 0]])).chunk(2)
            latent = F.normalize(first, dim=-1)
            same = torch.arange(len(first)).roll(len(first) // 2)
            similar = (latent @ F.normalize(second, dim=-1).T / 0.2).fill_diagonal_(-1e4)
            losses.append(F.cross_entropy(similar, same))
            firsts.append(latent[: len(latent) // 2].sum())
        loss, first = torch.stack(losses).mean(), torch.stack(firsts).mean()
        self.log_dict({"loss": loss, "first": first}, on_step=True, on_epoch=True, sync_dist=True)
        return {"loss": loss, "latent": latent}


@pytest.mark.parametrize("layout", [PIPELINE, pytest.param(LAYOUTS[1], marks=pytest.mark.matrix)], ids=str)
def test_several_views_in_one_batch(layout: Layout, workers: WorkerPools) -> None:
    num_missing = 3 if layout.dp == 1 else 0  # of replicas, the sampler fills up the last one's batch
    result = run_layout(workers, Job(model=partial(TwoViews, "mean"), data=labelled, num_missing=num_missing), layout)
    assert_parity(_reference(TwoViews, "mean", layout.dp, num_missing), result)


class Swapped(LossNet):
    """Predicts noise that the step draws, in an order that it draws, too, with a loss that couples samples."""

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        noise = torch.randn(len(batch[0]), LENGTH, CLASSES)
        order = torch.randperm(len(batch[0]))
        outputs = self(0.5 * (batch[0] + batch[0][order]) + noise[..., :1])
        error = F.mse_loss(outputs["logits"], 0.5 * (noise + noise[order]))
        couples = outputs["pooled"].std(0).mean()
        self.log("loss", error, on_step=True, on_epoch=True, sync_dist=True)
        return error + couples


def _first_error(loss: str) -> float:
    """What a layout logs of its first step."""
    L.seed_everything(1, verbose=False)
    trainer = L.Trainer(
        devices=2,
        strategy=replace(PIPELINE, loss=loss).strategy(),  # type: ignore[arg-type]
        max_steps=1,
        enable_checkpointing=False,
        **QUIET,
    )
    batches = DataLoader(labelled(8), batch_size=8)
    trainer.fit(Swapped("mean"), batches, batches)
    return float(trainer.callback_metrics["loss"])


def test_a_loss_of_the_batch_meets_the_noise_that_its_microbatches_met(workers: WorkerPools) -> None:
    by_microbatch, *_ = workers(2).run(_first_error, "mean")  # of which the logged error is the mean
    for logged in workers(2).run(_first_error, "auto"):
        assert logged == pytest.approx(by_microbatch, abs=1e-6)


class OneDraw(LossNet):
    """Draws one number for the whole batch."""

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        outputs = self(batch[0] * torch.rand(()))
        return self.loss(outputs, batch[1])


class DrawsOfNumPy(LossNet):
    """Draws a number with NumPy for each sample."""

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        drawn = torch.from_numpy(np.random.rand(len(batch[0]), 1, 1)).float()
        return self.loss(self(batch[0] * drawn), batch[1])


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (OneDraw, "draws random numbers in the step, for each microbatch others"),
        (DrawsOfNumPy, "draws other numbers of Python's or NumPy's random generators for the whole batch"),
    ],
)
def test_draws_that_do_not_make_up_the_batch_are_refused_where_samples_are_coupled(
    model: type[LossNet], message: str, workers: WorkerPools
) -> None:
    job = Job(model=partial(model, "triplet"), data=labelled, num_val_batches=0)
    with pytest.raises(WorkerError, match=message) as failed:
        run_layout(workers, job, replace(PIPELINE, loss="whole"))
    assert failed.value.failures.keys() == {0, 1}


class Chanced(LossNet):
    """Draws numbers of Python and NumPy for the whole batch, before and after the blocks, unless they are given."""

    def __init__(self, loss: str, given: tuple[float, float] | None = None) -> None:
        super().__init__(loss)
        self.given = given

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        before = np.random.rand() if self.given is None else self.given[0]
        outputs = self(batch[0] * before)
        after = random.random() if self.given is None else self.given[1]
        loss = self.loss(outputs, batch[1]) * after + outputs["logits"].square().mean() * before
        self.log("loss", loss, on_step=True, on_epoch=True, sync_dist=True)
        self.log_dict({"before": before, "after": after})
        return loss


def test_one_draw_of_python_for_the_batch_is_that_of_its_microbatches(workers: WorkerPools) -> None:
    job = Job(model=partial(Chanced, "triplet"), data=labelled, num_val_batches=0, steps=1)
    result = run_layout(workers, job, PIPELINE)
    drawn = tuple(result.numbers[0].metrics[name] for name in ("before", "after"))
    assert_parity(run_reference(replace(job, model=partial(Chanced, "triplet", drawn))), result)


class WarmedUp(LossNet):
    """Has a term that couples samples, with a weight that is zero at first."""

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        outputs = self(batch[0])
        loss = self.loss(outputs, batch[1]) + 0.5 * self.global_step * outputs["pooled"].std(0).mean()
        self.log("loss", loss, on_step=True, on_epoch=True, sync_dist=True)
        return loss


def test_a_term_whose_weight_is_zero_at_first(workers: WorkerPools) -> None:
    result = run_layout(workers, Job(model=partial(WarmedUp, "mean"), data=labelled), PIPELINE)
    assert_parity(_reference(WarmedUp, "mean", 1), result)


def _padded_later(num_samples: int) -> Dataset[tuple[Tensor, ...]]:
    """All labels of the first batches are valid, and none of the next two microbatches."""
    samples = labelled(num_samples)
    order = list(DistributedSampler(range(num_samples - 16), 1, 0, seed=1))
    features, labels = (torch.stack(column) for column in zip(*(samples[i] for i in range(num_samples)), strict=True))
    labels[order[:8]] = labels[order[:8]].clamp(min=1)
    labels[order[8:12]] = IGNORED
    labels[-16:-8] = labels[-16:-8].clamp(min=1)
    return TensorDataset(features, labels)


def _without_valid_ones_first(num_samples: int) -> Dataset[tuple[Tensor, ...]]:
    """The first microbatches have no valid label, in training and in validation."""
    samples = labelled(num_samples)
    order = list(DistributedSampler(range(num_samples - 16), 1, 0, seed=1))
    features, labels = (torch.stack(column) for column in zip(*(samples[i] for i in range(num_samples)), strict=True))
    for empty in (order[:4], range(num_samples - 16, num_samples - 12)):
        labels[list(empty)] = IGNORED
    return TensorDataset(features, labels)


@pytest.mark.parametrize("data", [_padded_later, _without_valid_ones_first])
def test_the_first_samples_do_not_show_the_rest(
    data: Callable[[int], Dataset[tuple[Tensor, ...]]], workers: WorkerPools
) -> None:
    job = Job(model=partial(LossNet, "ignoring"), data=data)
    assert_parity(run_reference(job), run_layout(workers, job, PIPELINE))
