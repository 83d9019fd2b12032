"""Tabular models of DeepTab, on random tables."""

from __future__ import annotations

from functools import partial
from typing import Any

import lightning as L
import torch
from deeptab.architectures.ft_transformer import FTTransformer
from deeptab.architectures.resnet import ResNet
from deeptab.configs import FTTransformerConfig, ResNetConfig
from deeptab.training.lightning_module import TaskModel
from torch import nn
from torch.utils.data import Dataset

from tests.packages.parity import PackageJob, dict_samples

NUM_COLUMNS, NUM_CATEGORIES = 3, 4


def table(num_samples: int) -> Dataset[Any]:
    """Rows of NUM_COLUMNS numbers and one category, with a number to predict."""
    generator = torch.Generator().manual_seed(0)
    numbers = torch.randn(num_samples, NUM_COLUMNS, 1, generator=generator)
    return dict_samples(
        [(([*row], [torch.tensor([i % NUM_CATEGORIES])], []), row.sum(0)) for i, row in enumerate(numbers)]
    )


def task(model: type[nn.Module], config: Any) -> L.LightningModule:
    numbers = {f"number {i}": {"preprocessing": "none", "dimension": 1, "categories": None} for i in range(NUM_COLUMNS)}
    categories = {"category": {"preprocessing": "int", "dimension": 1, "categories": NUM_CATEGORIES}}
    return TaskModel(model, config, (numbers, categories, {}), lr=1e-3, lr_patience=5, lr_factor=0.1, weight_decay=0.0)


TRANSFORMER = FTTransformerConfig(
    d_model=16,
    n_layers=2,
    n_heads=2,
    attn_dropout=0.0,
    ff_dropout=0.0,
    head_dropout=0.0,
    transformer_dim_feedforward=32,
)
RESNET = ResNetConfig(layer_sizes=[32, 32, 32], dropout=0.0)
JOBS = {
    "FTTransformer": PackageJob(module=partial(task, FTTransformer, TRANSFORMER), data=table),
    "ResNet": PackageJob(module=partial(task, ResNet, RESNET), data=table),
}
