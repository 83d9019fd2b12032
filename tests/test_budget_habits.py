"""Habits with a budget of memory: every way into a fit is planned, or the error says why it can't be."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from lightning_3d import ThreeDStrategy
from lightning_3d.errors import PlanError, StepError
from tests.models import TinyGPT, tokens
from tests.parity import QUIET, Layout
from tests.workers import WorkerPools

AUTO = {"recompute": "auto", "budget": 1.0}
TOO_SMALL = {"recompute": "auto", "budget": 1e-6}


class Manual(TinyGPT):
    """Steps by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


class Fetching(TinyGPT):
    """Fetches its batches."""

    def training_step(self, dataloader_iter: Iterator[Any]) -> Tensor:  # type: ignore[override]
        return super().training_step(next(dataloader_iter), 0)


class ReadsOptimizers(TinyGPT):
    """Its step is traced in a rehearsal, with optimizers."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        assert self.optimizers()
        return super().training_step(batch, batch_idx)


class Late(TinyGPT):
    """Its step can't be called before the Trainer trains."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if torch.is_grad_enabled() and not self.trainer.fit_loop.epoch_loop.batch_progress.total.ready:
            raise KeyError("no state yet")
        return super().training_step(batch, batch_idx)


def _trainer(layout: Layout, **settings: Any) -> L.Trainer:
    settings = {"max_epochs": 1, "limit_train_batches": 1, "limit_val_batches": 1, **QUIET, **settings}
    return L.Trainer(strategy=layout.strategy(), devices=layout.world_size, enable_checkpointing=False, **settings)


def _batches() -> DataLoader[tuple[Tensor, ...]]:
    return DataLoader(tokens(16), batch_size=4)


def _after_validation(layout: Layout) -> tuple[int, int, str]:
    """Rows of the plan's memory after validate(), after fit(), and the error of a fit within too little."""
    nums = []
    trainer = _trainer(layout)
    model = TinyGPT()
    assert isinstance(trainer.strategy, ThreeDStrategy)
    trainer.validate(model, _batches(), verbose=False)
    nums.append(len(trainer.strategy.plan.memory))
    trainer.fit(model, _batches(), _batches())
    nums.append(len(trainer.strategy.plan.memory))
    small = _trainer(Layout(pp=layout.pp, num_microbatches=layout.num_microbatches, activations=TOO_SMALL))
    small.validate(model, _batches(), verbose=False)
    with pytest.raises(PlanError) as raised:
        small.fit(model, _batches())
    return nums[0], nums[1], str(raised.value)


@pytest.mark.parametrize("layout", [Layout(pp=2, num_microbatches=2, activations=AUTO)], ids=str)
def test_a_fit_after_validation_has_its_budget(workers: WorkerPools, layout: Layout) -> None:
    for before, after, error in workers(layout.world_size).run(_after_validation, layout):
        assert (before, after) == (0, layout.pp)
        assert "needs at least" in error


def _refused(model: type[L.LightningModule]) -> str:
    with pytest.raises((StepError, PlanError)) as raised:
        _trainer(Layout(activations=AUTO)).fit(model(), _batches())
    return str(raised.value)


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (Manual, "manual optimization"),
        (Fetching, "which failed: TypeError"),
        (Late, "which failed: KeyError: 'no state yet'"),
    ],
)
def test_steps_that_are_not_traced_are_refused(
    workers: WorkerPools, model: type[L.LightningModule], reason: str
) -> None:
    (error,) = workers(1).run(_refused, model)
    assert reason in error
    assert "activations.budget=1.0 is planned by a trace" in error
    assert "eave out activations.budget" in error


def _num_rows(model: type[L.LightningModule]) -> int:
    trainer = _trainer(Layout(activations=AUTO))
    trainer.fit(model(), _batches())
    assert isinstance(trainer.strategy, ThreeDStrategy)
    return len(trainer.strategy.plan.memory)


def test_a_step_is_rehearsed_without_data_for_validation(workers: WorkerPools) -> None:
    assert workers(1).run(_num_rows, ReadsOptimizers) == [1]


class OneShot(IterableDataset[tuple[Tensor, ...]]):
    """A stream that each sample comes from once."""

    def __init__(self) -> None:
        self._samples = iter(tokens(16))

    def __iter__(self) -> Iterator[tuple[Tensor, ...]]:
        return self._samples


class _Batches(L.Callback):
    def __init__(self) -> None:
        self.first_samples: list[list[int]] = []

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        self.first_samples.append(batch[0][0].tolist())


def _seen() -> list[list[int]]:
    batches = _Batches()
    trainer = _trainer(Layout(activations=AUTO), callbacks=[batches], limit_train_batches=1.0)
    trainer.fit(TinyGPT(), DataLoader(OneShot(), batch_size=4))
    return batches.first_samples


def test_planning_takes_nothing_from_a_stream(workers: WorkerPools) -> None:
    expected = [tokens(16)[i][0].tolist() for i in (0, 4, 8, 12)]
    assert workers(1).run(_seen) == [expected]
