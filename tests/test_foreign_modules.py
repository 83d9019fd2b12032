"""Kinds of code in LightningModules of other packages: the numbers of one process in dp 2, pp 2 and tp 2."""

from __future__ import annotations

from collections import namedtuple
from functools import partial
from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_3d import ThreeDStrategy
from lightning_3d.model.blocks import find_blocks
from tests import architectures as a
from tests.models import features
from tests.parity import (
    QUIET,
    Job,
    Layout,
    assert_parity,
    assert_same_state,
    run_layout,
    run_reference,
    whole_state,
)
from tests.workers import WorkerError, WorkerPools

WIDTH = 32
LAYOUTS = (Layout(dp=2), Layout(pp=2, num_microbatches=2), Layout(tp=2))


class KeepsItsOutputClass(a.Trained):
    """Makes the class of its outputs in every step, and keeps it."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 4))

    def compute_loss(self, batch: Any) -> Tensor:
        inputs, targets = batch
        self.output_class = namedtuple("Output", ["prediction"])
        output = self.output_class(self.layers(inputs))
        return F.mse_loss(output.prediction, targets)


class Selection(nn.Module):
    """Scales with modules that it is given, which others have, too."""

    def __init__(self, scalers: dict[str, nn.Module]) -> None:
        super().__init__()
        self.scalers = nn.ModuleDict()
        for name, scaler in scalers.items():
            self.scalers[name] = scaler
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        for scaler in self.scalers.values():
            x = scaler(x).tanh()
        result: Tensor = self.inner(x)
        return result


class SharesModules(a.Trained):
    """The same layers are held by the module itself, by a part that is a block and by one that is not."""

    def __init__(self, *, own_come_first: bool) -> None:
        super().__init__()
        scalers = {name: nn.Linear(WIDTH, WIDTH) for name in ("first", "second")}
        self.embed = nn.Linear(8, WIDTH)
        if own_come_first:
            self.scalers = nn.ModuleDict(scalers)
        self.encoder = Selection({"first": scalers["first"]})
        self.decoder = Selection(scalers)
        if not own_come_first:
            self.scalers = nn.ModuleDict(scalers)
        self.head = nn.Linear(WIDTH, 4)

    def compute_loss(self, batch: Any) -> Tensor:
        inputs, targets = batch
        return F.mse_loss(self.head(self.decoder(self.encoder(self.embed(inputs)))), targets)


class AsksForTheDeviceOfItsParameters(KeepsItsOutputClass):
    """Makes tensors on the one device that its parameters are on, and moves its batch there."""

    def compute_loss(self, batch: Any) -> Tensor:
        (device,) = {parameter.device for parameter in self.parameters()}
        inputs, targets = (tensor.to(next(self.parameters()).device) for tensor in batch)
        scales = torch.linspace(1, 2, targets.shape[1], device=device)
        last = self.layers[-1].weight
        return F.mse_loss(self.layers(inputs) * scales.to(last.device), targets.to(device=last.device))


SHARING = [partial(SharesModules, own_come_first=first) for first in (True, False)]


@pytest.mark.parametrize("own_come_first", [True, False])
def test_no_block_holds_another(own_come_first: bool) -> None:
    blocks = find_blocks(SharesModules(own_come_first=own_come_first))
    scalers = {"scalers.first", "scalers.second"}
    if not own_come_first:
        scalers = {"encoder.scalers.first", "decoder.scalers.second"}
    assert set(blocks) == scalers | {"embed", "encoder.inner", "decoder.inner", "head"}


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("model", [KeepsItsOutputClass, *SHARING, AsksForTheDeviceOfItsParameters])
def test_module_trains_as_in_one_process(workers: WorkerPools, model: Any, layout: Layout) -> None:
    job = Job(model=model, data=features)
    assert_parity(run_reference(job), run_layout(workers, job, layout), tolerance=1e-5)


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


@pytest.mark.parametrize("splits", [True, False])
def test_batches_that_cannot_be_split_are_taken_whole(workers: WorkerPools, splits: bool) -> None:
    (expected,) = workers(1).run(_fit_graphs, None)
    pipeline = {} if splits else {"num_microbatches": 1, "schedule": "gpipe"}
    strategy = {"pipeline_parallel_size": 2, "pipeline": pipeline}
    if splits:
        with pytest.raises(WorkerError, match=r"pipeline.num_microbatches=1 and pipeline.schedule='gpipe'"):
            workers(2).run(_fit_graphs, strategy)
    else:
        assert all(value.isfinite().all() for value in expected.values())
        assert_same_state(workers(2).run(_fit_graphs, strategy), expected)
