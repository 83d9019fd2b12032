"""What looks like misuse but is supported: it gives what one process gives."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import lightning as L
import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, Dataset

from lightning_3d import ThreeDStrategy
from tests.models import TinyMLP
from tests.workers import WorkerPools

STEPS = 4
BATCH_SIZE = 8
"""Over all replicas."""

PIPELINE: Mapping[str, Any] = {"pipeline_parallel_size": 2}
TENSOR: Mapping[str, Any] = {"tensor_parallel_size": 2}

Batch = tuple[Tensor, Tensor]


@dataclass(frozen=True, kw_only=True)
class Trained:
    """The outcome of a run on one rank."""

    losses: list[float]
    """Of the batches of this rank's replica."""
    weights: dict[str, Tensor]
    """Of the parameters that this rank holds, whole."""


class _Losses(L.Callback):
    def __init__(self) -> None:
        self.values: list[float] = []

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self.values.append(float(outputs["loss"]))


def _train(model: L.LightningModule, data: Any, *, devices: int = 2, **arguments: Any) -> Trained:
    losses = _Losses()
    trainer = L.Trainer(
        accelerator="cpu",
        devices=devices,
        max_steps=STEPS,
        num_sanity_val_steps=0,
        limit_val_batches=0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[losses],
        **arguments,
    )
    trainer.fit(model, data)
    weights = {
        name: (parameter.full_tensor() if isinstance(parameter, DTensor) else parameter).detach().clone()
        for name, parameter in model.named_parameters()
        if not parameter.is_meta
    }
    return Trained(losses=losses.values, weights=weights)


# ------------------------------------------------------------------------------------------ batches that differ by rank


class DiffersByRank(Dataset[Batch]):
    """Samples that depend on the rank, as augmentation with a seed per rank makes them."""

    def __init__(self, shift: float) -> None:
        self.shift = shift

    def __len__(self) -> int:
        return STEPS * BATCH_SIZE

    def __getitem__(self, index: int) -> Batch:
        x = torch.full((8,), float(index)).cos() + self.shift * dist.get_rank()
        return x, x[:4]


def _train_broadcast(settings: Mapping[str, Any], *, shift: float, broadcast: bool) -> Trained:
    L.seed_everything(0, verbose=False)
    strategy = ThreeDStrategy(**settings, batch={"broadcast": broadcast})
    return _train(TinyMLP(), DataLoader(DiffersByRank(shift), batch_size=BATCH_SIZE), strategy=strategy)


def _train_with_and_without(settings: Mapping[str, Any]) -> tuple[Trained, Trained]:
    """Train on data that differ by rank, broadcast; and on the data of rank 0 everywhere."""
    different = _train_broadcast(settings, shift=1.0, broadcast=True)
    return different, _train_broadcast(settings, shift=0.0, broadcast=False)


@pytest.mark.parametrize("settings", [PIPELINE, TENSOR], ids=["pipeline", "tensor"])
def test_broadcasting_repairs_batches_that_differ(workers: WorkerPools, settings: Mapping[str, Any]) -> None:
    for different, expected in workers(2).run(_train_with_and_without, settings):
        assert different.losses == expected.losses
        assert len(different.losses) == STEPS
        assert different.weights.keys() == expected.weights.keys()
        assert all(torch.equal(different.weights[name], expected.weights[name]) for name in expected.weights)
