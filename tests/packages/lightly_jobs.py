"""The linear evaluation of Lightly, on random features."""

from __future__ import annotations

from typing import Any

import lightning as L
import torch
from lightly.utils.benchmarking import LinearClassifier
from torch import nn
from torch.utils.data import Dataset

from tests.packages.parity import GLOBAL_BATCH_SIZE, PackageJob, dict_samples

NUM_CLASSES, WIDTH = 4, 32


def inputs(num_samples: int) -> Dataset[Any]:
    """Vectors with a class each."""
    generator = torch.Generator().manual_seed(0)
    vectors = torch.randn(num_samples, 8, generator=generator)
    return dict_samples([(vector, torch.tensor(i % NUM_CLASSES)) for i, vector in enumerate(vectors)])


def linear_classifier() -> L.LightningModule:
    backbone = nn.Sequential(nn.Linear(8, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH))
    return LinearClassifier(
        backbone,
        batch_size_per_device=GLOBAL_BATCH_SIZE,
        lr=0.1,
        feature_dim=WIDTH,
        num_classes=NUM_CLASSES,
        topk=(1,),
    )


def tell_batch_size(module: L.LightningModule, num_ranks: int, num_replicas: int) -> None:
    """Its learning rate goes with this times `trainer.world_size`, which counts all ranks, not replicas."""
    module.batch_size_per_device = GLOBAL_BATCH_SIZE // num_ranks


JOBS = {"LinearClassifier": PackageJob(module=linear_classifier, data=inputs, prepare=tell_batch_size)}
