"""Batches that differ by rank: broadcasting repairs them."""

from __future__ import annotations

from typing import Any

import lightning as L
import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from lightning_3d import ThreeDStrategy
from tests.models import TinyMLP
from tests.parity import QUIET, assert_same_state, whole_state
from tests.workers import WorkerPools


class DiffersByRank(Dataset[tuple[Tensor, Tensor]]):
    """Samples that depend on the rank, as augmentation with a seed per rank makes them."""

    def __init__(self, shift: float) -> None:
        self.shift = shift

    def __len__(self) -> int:
        return 32

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        x = torch.full((8,), float(index)).cos() + self.shift * dist.get_rank()
        return x, x[:4]


def _trained(settings: dict[str, Any], shift: float) -> dict[str, Tensor]:
    L.seed_everything(0, verbose=False)
    strategy = ThreeDStrategy(**settings, batch={"broadcast": shift > 0})
    trainer = L.Trainer(
        strategy=strategy, devices=2, max_steps=4, limit_val_batches=0, enable_checkpointing=False, **QUIET
    )
    trainer.fit(TinyMLP(), DataLoader(DiffersByRank(shift), batch_size=8))
    return whole_state(trainer)


@pytest.mark.parametrize("setting", ["pipeline_parallel_size", "tensor_parallel_size"])
def test_broadcasting_repairs_batches_that_differ(workers: WorkerPools, setting: str) -> None:
    alike = workers(2).run(_trained, {setting: 2}, 0.0)
    assert_same_state(workers(2).run(_trained, {setting: 2}, 1.0), alike[0])
