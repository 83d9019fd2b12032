"""Trainers of TorchGeo, on random images."""

from __future__ import annotations

from typing import Any

import lightning as L
import torch
from torch.utils.data import Dataset
from torchgeo.trainers import ClassificationTask

from tests.packages.parity import PackageJob, dict_samples

NUM_CLASSES, SIZE = 4, 160


def images(num_samples: int) -> Dataset[Any]:
    """Images with a class each."""
    generator = torch.Generator().manual_seed(0)
    pixels = torch.rand(num_samples, 3, SIZE, SIZE, generator=generator)
    return dict_samples([{"image": image, "label": torch.tensor(i % NUM_CLASSES)} for i, image in enumerate(pixels)])


def classification() -> L.LightningModule:
    return ClassificationTask(model="test_vit", weights=None, in_channels=3, num_classes=NUM_CLASSES)


JOBS = {
    "ClassificationTask": PackageJob(
        module=classification,
        data=images,
        of_replicas=frozenset({"train_AverageAccuracy", "train_F1Score", "train_JaccardIndex"}),
    ),
}
