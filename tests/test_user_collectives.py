"""Collectives that user code asks for, over the replicas in every layout: in hooks, in steps, in what is logged."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torchmetrics import SumMetric

from tests.models import TinyMLP, features
from tests.parity import Layout, assert_same_state, fitted, whole_state
from tests.workers import WorkerPools

Batch = tuple[Tensor, Tensor]

LAYOUTS = [Layout(dp=2), Layout(pp=2), Layout(tp=2)]


class Contrasts(TinyMLP):
    """Compares every sample with those of all replicas, and logs and keeps numbers of all of them."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[float] = []
        self.outside = [SumMetric()]  # no submodule

    def on_train_batch_start(self, batch: Batch, batch_idx: int) -> None:
        self.seen.append(float(self.all_gather(batch[0].sum()).sum()))
        self.seen.append(float(self.all_gather({"x": [batch[0]]})["x"][0].sum()))

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        outputs = self.all_gather(F.normalize(self(batch[0]), dim=1), sync_grads=True).flatten(0, 1)
        targets = self.all_gather(F.normalize(batch[1], dim=1)).flatten(0, 1)
        loss = F.cross_entropy(outputs @ targets.T, torch.arange(len(outputs)))
        self.log("loss", loss, on_step=True, on_epoch=True, sync_dist=True, sync_dist_group=dist.group.WORLD)
        self.log("peak", self.all_gather(outputs.detach()).amax(), on_epoch=True)
        return loss

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        error = F.mse_loss(self(batch[0]), batch[1])
        self.log("spread", self.all_gather(self(batch[0])).flatten(0, 1).std())
        self.log("val", self.trainer.strategy.reduce(error.clone()))

    def on_validation_batch_end(self, outputs: Any, batch: Batch, batch_idx: int) -> None:  # type: ignore[override]
        self.outside[0].update(batch[0].sum())

    def on_validation_epoch_end(self) -> None:
        self.seen.append(float(self.outside[0].compute()))
        self.outside[0].reset()
        summed = self.trainer.strategy.reduce(torch.tensor(1.0), reduce_op="sum") / self.all_gather(torch.ones(1)).sum()
        self.seen.append(float(summed))
        self.trainer.strategy.barrier()


class ContrastsAlone(Contrasts):
    """The same in one process, where ``all_gather`` adds no dimension."""

    def all_gather(self, data: Any, group: Any = None, sync_grads: bool = False) -> Any:
        return {"x": [data["x"][0][None]]} if isinstance(data, dict) else data[None]


def contrasts(layout: Layout | None) -> tuple[dict[str, Tensor], list[float], dict[str, float]]:
    model = ContrastsAlone if layout is None else Contrasts
    trainer, module = fitted(layout, model, data=features, batches=3)
    assert isinstance(module, Contrasts)
    return whole_state(trainer), module.seen, {name: float(value) for name, value in trainer.callback_metrics.items()}


def contrasts_in(layouts: list[Layout]) -> list[tuple[dict[str, Tensor], list[float], dict[str, float]]]:
    return [contrasts(layout) for layout in layouts]


def test_all_gather_and_reduce_are_over_the_replicas(workers: WorkerPools) -> None:
    state, seen, metrics = workers(1).run(contrasts, None)[0]
    for of_rank in workers(2).run(contrasts_in, LAYOUTS):
        for found, its_seen, its_metrics in of_rank:
            assert_same_state([found], state)
            assert its_seen == pytest.approx(seen, rel=1e-4, abs=1e-4)
            assert its_metrics == pytest.approx(metrics, abs=1e-5)
