"""Message passing on molecules by Chemprop."""

from __future__ import annotations

from typing import Any

import lightning as L
import numpy as np
from chemprop.data import MoleculeDatapoint, MoleculeDataset, collate_batch
from chemprop.models import MPNN
from chemprop.nn import BondMessagePassing, MeanAggregation, RegressionFFN
from torch.utils.data import Dataset

from tests.packages.parity import PackageJob

SMILES = ("CCO", "CCN", "CCC", "CC(=O)O", "c1ccccc1", "CCCl", "COC", "C1CCCC1")


def molecules(num_samples: int) -> Dataset[Any]:
    """Small molecules with a number each."""
    random = np.random.default_rng(0)
    points = [MoleculeDatapoint.from_smi(SMILES[i % len(SMILES)], y=random.normal(size=1)) for i in range(num_samples)]
    dataset: Dataset[Any] = MoleculeDataset(points)
    return dataset


def mpnn() -> L.LightningModule:
    return MPNN(BondMessagePassing(d_h=32, depth=2), MeanAggregation(), RegressionFFN(input_dim=32, hidden_dim=32))


JOBS = {"MPNN": PackageJob(module=mpnn, data=molecules, collate=collate_batch, trainer={"max_epochs": 3})}
