"""With one replica a layout sees the batches of one process, in the same order."""

from __future__ import annotations

from functools import cache
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset, WeightedRandomSampler

from lightning_3d import ThreeDStrategy
from tests.models import TinyMLP
from tests.parity import QUIET
from tests.workers import WorkerPools

LAYOUTS = [{"pipeline_parallel_size": 2}, {"tensor_parallel_size": 2}]


class Seen(L.Callback):
    """Notes the samples of each batch of training and validation."""

    def __init__(self) -> None:
        self.numbers: list[list[float]] = []

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: list[Tensor], batch_idx: int) -> None:
        self.numbers.append(batch[0][:, 0].tolist())

    def on_validation_batch_start(self, trainer: Any, pl_module: Any, batch: list[Tensor], *args: Any) -> None:
        self.numbers.append(batch[0][:, 0].tolist())


class ConfiguredMLP(TinyMLP):
    """Made when the Trainer asks for it."""

    def __init__(self) -> None:
        super().__init__(num_layers=1)
        self.more: torch.nn.Module | None = None

    def configure_model(self) -> None:
        if self.more is None:
            self.more = torch.nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        assert self.more is not None
        y: Tensor = self.more(super().forward(x))
        return y


def _seen(sizes: dict[str, int] | None, order: str, configured: bool) -> tuple[list[list[float]], list[float]]:
    """The samples of all batches, and the losses."""
    L.seed_everything(7, verbose=False)
    model = ConfiguredMLP() if configured else TinyMLP()
    data = TensorDataset(torch.arange(24.0)[:, None].expand(24, 8) / 24, torch.ones(24, 4))
    sampler = WeightedRandomSampler(torch.arange(24.0).tolist(), 24) if order == "sampler" else None
    train = DataLoader(data, batch_size=4, shuffle=order == "shuffled", sampler=sampler)
    seen = Seen()
    trainer = L.Trainer(
        strategy="auto" if sizes is None else ThreeDStrategy(**sizes),  # type: ignore[arg-type]
        devices=1 if sizes is None else 2,
        max_epochs=2,
        callbacks=[seen],
        enable_checkpointing=False,
        **{**QUIET, "num_sanity_val_steps": 1},
    )
    trainer.fit(model, train, DataLoader(data, batch_size=6))
    return seen.numbers, [float(trainer.callback_metrics["loss"])]


@cache
def _expected(order: str, configured: bool) -> tuple[list[list[float]], list[float]]:
    return _seen(None, order, configured)


@pytest.mark.parametrize("sizes", LAYOUTS, ids=str)
@pytest.mark.parametrize(
    ("order", "configured"), [("plain", False), ("shuffled", False), ("shuffled", True), ("sampler", False)]
)
def test_batches_come_in_the_users_order(
    order: str, configured: bool, sizes: dict[str, int], workers: WorkerPools
) -> None:
    numbers, losses = _expected(order, configured)
    for seen, own_losses in workers(2).run(_seen, sizes, order, configured):
        assert seen == numbers
        assert own_losses == pytest.approx(losses, abs=1e-5)
