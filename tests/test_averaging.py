"""Averages of weights in checkpoints of every layout; those made by hand are a habit of the law."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import EMAWeightAveraging, StochasticWeightAveraging
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from tests.law.models.spellings import FusedQKV
from tests.models import ADAM_EPS, TinyGPT, TinyMLP, features
from tests.parity import Job, Layout, assert_parity, assert_same_state, fitted, run_layout, whole_state
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


class Taught(TinyMLP):
    """Follows an average of its weights by torch's multi-tensor functions, on another pipeline stage than its own."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = AveragedModel(self.layers, multi_avg_fn=get_ema_multi_avg_fn(0.5)).requires_grad_(False)

    def on_train_batch_start(self, batch: object, batch_idx: int) -> None:
        self.teacher.update_parameters(self.layers)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        output = self(batch[0])
        loss = F.mse_loss(output, batch[1]) + F.mse_loss(output, self.teacher(batch[0]).detach())
        self.log("loss", loss, on_step=True, on_epoch=True, sync_dist=True)
        return loss


@pytest.mark.parametrize("layout", [Layout(pp=2), Layout(pp=2, tp=2), Layout(pp=2, dp=2, zero=3)], ids=str)
def test_a_teacher_in_a_pipeline_averages_by_multi_tensor_functions(workers: WorkerPools, layout: Layout) -> None:
    job = Job(model=Taught, data=features)
    assert_parity(job, run_layout(workers, job, layout))


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
            with warnings.catch_warnings():
                warnings.filterwarnings("error", ".*a file of it would not hold the model")
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
