"""Modules that hold others' modules, and batches that can't be split."""

from __future__ import annotations

from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_3d import ThreeDStrategy
from lightning_3d.model.blocks import find_blocks
from tests.law.models.programs import OddParameters
from tests.parity import (
    QUIET,
    assert_same_state,
    whole_state,
)
from tests.workers import WorkerError, WorkerPools

WIDTH = 32


def test_no_block_holds_another() -> None:
    held = [module for block in find_blocks(OddParameters()).values() for module in block.modules()]
    assert len(held) == len({*held})
    assert {"scalers.one", "scalers.two", "encoder.inner"} <= {*find_blocks(OddParameters())}


class Graphs(L.LightningModule):
    """A batch is a graph of several molecules: nodes, edges and targets, of which there are different numbers each."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(8, WIDTH)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(4))
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        x = self.embed(batch["nodes"])
        source, target = batch["edges"]
        for layer in self.layers:
            x = x + layer(torch.zeros_like(x).index_add(0, target, x[source]))
        pooled = x.new_zeros(len(batch["targets"]), WIDTH).index_add(0, batch["graph"], x)
        prediction: Tensor = self.head(pooled).squeeze(-1)
        return prediction

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss = F.mse_loss(self(batch), batch["targets"])
        self.log("loss", loss, batch_size=len(batch["targets"]))
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=1e-3, eps=1e-3)


def _graphs() -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    batches = []
    for num_nodes, num_edges, num_graphs in ((9, 20, 3), (7, 12, 2), (11, 31, 4), (9, 20, 3)):
        edges = torch.randint(num_nodes, (2, num_edges), generator=generator)
        graph = torch.randint(num_graphs, (num_nodes,), generator=generator)
        nodes = torch.randn(num_nodes, 8, generator=generator)
        targets = torch.randn(num_graphs, generator=generator)
        batches.append({"nodes": nodes, "edges": edges, "graph": graph, "targets": targets})
    return batches


def _fit_graphs(strategy: dict[str, Any] | None) -> dict[str, Tensor]:
    L.seed_everything(1, verbose=False)
    made = "auto" if strategy is None else ThreeDStrategy(**strategy)
    devices = 1 if strategy is None else 2
    trainer = L.Trainer(strategy=made, devices=devices, max_epochs=2, enable_checkpointing=False, **QUIET)
    trainer.fit(Graphs(), DataLoader(_graphs(), batch_size=None, shuffle=False))
    return whole_state(trainer)


def test_batches_that_cannot_be_split_are_taken_whole(workers: WorkerPools) -> None:
    (expected,) = workers(1).run(_fit_graphs, None)
    assert all(value.isfinite().all() for value in expected.values())
    with pytest.raises(WorkerError, match=r"pipeline.num_microbatches=1 and pipeline.schedule='gpipe'"):
        workers(2).run(_fit_graphs, {"pipeline_parallel_size": 2})
    whole = {"pipeline_parallel_size": 2, "pipeline": {"num_microbatches": 1, "schedule": "gpipe"}}
    assert_same_state(workers(2).run(_fit_graphs, whole), expected)
