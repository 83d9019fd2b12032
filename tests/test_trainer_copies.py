"""A copy of the Trainer has the settings and the model of the original, and trains on where the model is whole."""

from __future__ import annotations

import copy
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor

from lightning_3d import StepError, ThreeDStrategy
from tests.models import TinyMLP, features, loader
from tests.parity import Layout, assert_same_state, fitted, whole_state
from tests.workers import WorkerPools


class Copies(L.Callback):
    """Copies the Trainer while it runs, by itself and through a callback that knows it."""

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        copied = copy.deepcopy(trainer)
        assert isinstance(copied.strategy, ThreeDStrategy)
        assert copied.strategy.config == trainer.strategy.config  # type: ignore[attr-defined]
        assert copied.lightning_module is not pl_module
        copy.deepcopy(trainer.callbacks)


def _train_on(layout: Layout) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """States of the copy, and of the original, which trains on after it."""
    shown: dict[str, Any] = {"enable_progress_bar": True}
    original, _ = fitted(layout, TinyMLP, data=features, callbacks=[Copies()], **shown)
    copied = copy.deepcopy(original)
    data = loader(features(16), global_batch_size=8, data_parallel_size=layout.dp)
    for trainer in (copied, original):
        trainer.fit_loop.max_epochs = 3
        trainer.fit(trainer.lightning_module, data)
        assert trainer.current_epoch == 3
    return whole_state(copied), whole_state(original)


@pytest.mark.parametrize("layout", [Layout(), Layout(dp=2, zero=2)], ids=str)
def test_a_copy_of_the_trainer_trains_on(workers: WorkerPools, layout: Layout) -> None:
    for of_copy, of_original in workers(layout.world_size).run(_train_on, layout):
        assert_same_state([of_copy], of_original)


def _saved_with_trainer() -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    trainer, module = fitted(Layout(), TinyMLP, data=features, epochs=1)
    torch.save(trainer, "trainer.pt")
    loaded = torch.load("trainer.pt", weights_only=False)
    return loaded.lightning_module.state_dict(), module.state_dict()


def test_a_trainer_is_pickled_with_its_model(workers: WorkerPools) -> None:
    for of_loaded, of_module in workers(1).run(_saved_with_trainer):
        assert_same_state([of_loaded], of_module)


def _train_parts_on(layout: Layout) -> None:
    with pytest.raises(StepError, match=r"made parallel before.*summon_full_params"):
        _train_on(layout)


@pytest.mark.parametrize("layout", [Layout(pp=2), Layout(dp=2, zero=3)], ids=str)
def test_a_copy_of_parts_is_refused_when_it_trains(workers: WorkerPools, layout: Layout) -> None:
    workers(layout.world_size).run(_train_parts_on, layout)
