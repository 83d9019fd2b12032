"""Lightning's Tuner where one replica spans several ranks: as in one process, or refused on all ranks."""

from __future__ import annotations

import warnings
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import BatchSizeFinder
from lightning.pytorch.tuner import Tuner
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_3d import ThreeDStrategy
from lightning_3d.errors import StepError
from tests.models import TinyMLP, features
from tests.parity import QUIET
from tests.workers import WorkerPools

PIPELINE = {"pipeline_parallel_size": 2}


class Loading(TinyMLP):
    """Has its own data, whose batch size can be tuned."""

    def __init__(self) -> None:
        super().__init__()
        self.batch_size = 4

    def train_dataloader(self) -> Any:
        return DataLoader(features(16), batch_size=self.batch_size)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.log("tuned", loss, on_epoch=True)  # a name of its own: Lightning gives advice once for each
        return loss


def _trainer(sizes: dict[str, int], **settings: Any) -> L.Trainer:
    devices = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
    strategy = ThreeDStrategy(**sizes) if sizes else "auto"  # type: ignore[arg-type]  # sizes alone
    return L.Trainer(**QUIET, devices=devices, strategy=strategy, enable_checkpointing=False, **settings)


def _found(sizes: dict[str, int]) -> tuple[list[float], float, list[str]]:
    """Losses of the search for a learning rate, that of a step after it, and advice about logging."""
    L.seed_everything(3, verbose=False)
    trainer, model = _trainer(sizes, max_steps=1), Loading()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        finder = Tuner(trainer).lr_find(model, num_training=8, early_stop_threshold=None, update_attr=False)
        trainer.fit(model)
    assert finder is not None
    advice = [str(warning.message) for warning in said if "sync_dist" in str(warning.message)]
    return finder.results["loss"], trainer.callback_metrics["loss_step"].item(), advice


def test_search_for_a_learning_rate_is_that_of_one_process(workers: WorkerPools) -> None:
    (reference,) = workers(1).run(_found, {})
    for losses, loss, advice in workers(2).run(_found, PIPELINE):
        assert losses == pytest.approx(reference[0], abs=1e-5)
        assert loss == pytest.approx(reference[1], abs=1e-5)
        assert advice == []  # of one replica all ranks log the same


def _error(sizes: dict[str, int]) -> str:
    with pytest.raises(StepError) as error:
        _trainer(sizes, max_steps=1, callbacks=[BatchSizeFinder()]).fit(Loading())
    trainer, model = _trainer(sizes, max_steps=1), Loading()
    trainer.fit(model)
    with pytest.raises(StepError):
        Tuner(trainer).scale_batch_size(model)
    return str(error.value)


def test_search_for_a_batch_size_is_refused(workers: WorkerPools) -> None:
    for message in workers(2).run(_error, PIPELINE):
        assert "on 2 ranks it may run out on one of them" in message
