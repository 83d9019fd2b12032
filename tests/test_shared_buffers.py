"""Buffers that steps change are the first replica's in all replicas, as under Lightning's DDP."""

from __future__ import annotations

from typing import Any

import lightning as L
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_3d import ThreeDStrategy
from lightning_3d.distributed.mesh import MeshShape, shared_mesh
from lightning_3d.model.initial_weights import place_weights
from lightning_3d.run.parallel.shared_buffers import SharedBuffers
from tests.models import TinyMLP, features, loader
from tests.parity import QUIET
from tests.workers import WorkerPools

Batch = tuple[Tensor, Tensor]


class Normalised(TinyMLP):
    """Computes with buffers that it changes: a norm's statistics and a running centre, with a counter and flags."""

    count: Tensor
    centre: Tensor
    is_seen: Tensor

    def __init__(self) -> None:
        super().__init__(lr=0.05)
        self.norm = nn.BatchNorm1d(8)
        self.register_buffer("centre", torch.zeros(8))
        self.register_buffer("count", torch.tensor(0))
        self.register_buffer("is_seen", torch.zeros(3, dtype=torch.bool))

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = super().forward(self.norm(x) - 0.1 * self.centre)
        return made

    def training_step(self, batch: Batch, batch_idx: int) -> Any:
        self.centre.mul_(0.5).add_(batch[0].detach().mean(0), alpha=0.5)
        self.count += int(batch[0].sum() > 0) + 1
        self.is_seen[batch_idx % 3] = bool(batch[0][0, 0] > 0)
        return super().training_step(batch, batch_idx)


def run(strategy: str, settings: dict[str, Any], accumulate: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    L.seed_everything(1, verbose=False)
    made = ThreeDStrategy(zero=settings) if strategy == "3d" else strategy
    how: dict[str, Any] = {**QUIET, "max_epochs": 2, "enable_checkpointing": False}
    trainer = L.Trainer(strategy=made, devices=2, accumulate_grad_batches=accumulate, **how)
    module, samples = Normalised(), features(32)
    batches = loader(samples, global_batch_size=8, data_parallel_size=2)
    trainer.fit(module, batches, batches)
    seen = {name: torch.as_tensor(value).clone() for name, value in trainer.callback_metrics.items()}
    return seen, {name: buffer.clone() for name, buffer in module.named_buffers()}


def in_both(stage: int, accumulate: int) -> list[tuple[dict[str, Tensor], dict[str, Tensor]]]:
    return [run("ddp", {}, accumulate), run("3d", {"stage": stage}, accumulate)]


@pytest.mark.parametrize(("stage", "accumulate"), [(1, 2), (3, 1)])
def test_replicas_have_the_buffers_of_ddp(workers: WorkerPools, stage: int, accumulate: int) -> None:
    ranks = workers(2).run(in_both, stage, accumulate)
    for (metrics, buffers), (seen, made) in ranks:
        torch.testing.assert_close(seen, metrics, atol=1e-5, rtol=0)
        torch.testing.assert_close(made, buffers, atol=1e-5, rtol=0)
    of_ranks = [made for _, (_, made) in ranks]
    torch.testing.assert_close(of_ranks[0], of_ranks[1], atol=0, rtol=0)


class Caching(TinyMLP):
    """Has caches that differ between ranks when the model is made parallel, and a centre that does not."""

    centre: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("centre", torch.zeros(8))

    def on_rank(self, rank: int) -> None:
        self.register_buffer("cache", torch.full((8 << rank,), float(rank)), persistent=False)
        if rank == 0:
            self.register_buffer("alone", torch.ones(1000), persistent=False)

    def training_step(self, batch: Batch, batch_idx: int) -> Any:
        self.centre.add_(batch[0].mean(0))
        return super().training_step(batch, batch_idx)


def with_caches() -> tuple[Tensor, Tensor]:
    """A cache of this rank and what all share, after steps."""
    module = Caching()
    module.on_rank(dist.get_rank())
    shape = MeshShape(pp=1, dp=2, cp=1, tp=1)
    mesh = shared_mesh(shape, device_type="cpu", zero_stage=0, shard_size=None, timeout=None)
    buffers = SharedBuffers(module, mesh, torch.device("cpu"))
    module.centre.fill_(1.0 + dist.get_rank())
    buffers.before_step(are_due_after=True)
    module.register_buffer("cache", torch.full((64,), float(dist.get_rank())), persistent=False)
    buffers.before_step(are_due_after=False)
    place_weights(module, lambda fqn: True, torch.device("cpu"))
    return module.get_buffer("cache"), module.centre


def test_caches_stay_each_ranks_own(workers: WorkerPools) -> None:
    for rank, (cache, centre) in enumerate(workers(2).run(with_caches)):
        assert torch.equal(centre, torch.ones(8)), "the first replica's"
        assert cache.numel() == 64
        assert rank == 0 or cache[0] in (0, 1)
