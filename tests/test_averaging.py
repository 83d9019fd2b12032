"""Averages of weights in checkpoints of every layout; those made by hand are a habit of the law."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import EMAWeightAveraging, StochasticWeightAveraging
from torch import Tensor, nn

from tests.law.models.spellings import FusedQKV
from tests.models import ADAM_EPS, TinyGPT
from tests.parity import Layout, assert_same_state, fitted, whole_state
from tests.workers import WorkerPools


class Model(TinyGPT):
    """Tied and fused weights, a buffer in every block and a schedule."""

    def __init__(self) -> None:
        super().__init__(width=16, num_heads=2, num_layers=2)
        self.blocks = nn.ModuleList(FusedQKV(width=16, num_heads=2) for _ in range(2))
        for block in self.blocks:
            block.register_buffer("scale", torch.tensor(0.5))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2, eps=ADAM_EPS)
        return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)}


# ---- checkpoints

SAVED: dict[str, Callable[[], L.Callback]] = {
    "EMAWeightAveraging": partial(EMAWeightAveraging, decay=0.5),
    "SWA": partial(StochasticWeightAveraging, swa_lrs=1e-2, swa_epoch_start=1),
}


class _Save(L.Callback):
    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if trainer.current_epoch == 1:
            trainer.save_checkpoint(self.path)


def _resume(first: Layout | None, second: Layout | None, name: str) -> dict[str, Tensor]:
    path = Path("averaged.ckpt")
    fitted(first, Model, callbacks=[SAVED[name](), _Save(path)], batches=2, epochs=2)
    trainer, _ = fitted(second, Model, callbacks=[SAVED[name]()], batches=2, epochs=3, ckpt_path=path)
    return whole_state(trainer)


def _resume_all(first: Layout | None, second: Layout | None) -> dict[str, dict[str, Tensor]]:
    return {name: _resume(first, second, name) for name in SAVED}


@pytest.fixture(scope="module")
def resumed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Tensor]]:
    """By one process."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("resumed"))
        return _resume_all(None, None)


@pytest.mark.parametrize(
    ("first", "second", "folder"),
    [
        (Layout(dp=2, zero=1), Layout(dp=2, zero=3), True),
        (Layout(pp=2), Layout(tp=2), False),
    ],
    ids=str,
)
def test_averages_are_resumed_in_any_layout(
    workers: WorkerPools, resumed: dict[str, dict[str, Tensor]], first: Layout, second: Layout, folder: bool
) -> None:
    layouts = [replace(layout, save_distributed_checkpoint=folder) for layout in (first, second)]
    for rank in workers(2).run(_resume_all, *layouts):
        for name, expected in resumed.items():
            assert_same_state([rank[name]], expected)
