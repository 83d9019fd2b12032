"""Norms in a pipeline: they normalise by microbatch, statistics are the first replica's, and all of it is told.

That running statistics are those of one process is the model `norms-everywhere` of tests/law.
"""

from __future__ import annotations

import io
import re
from dataclasses import replace
from typing import Any

import lightning as L
import torch
from rich.console import Console
from torch import Tensor, nn

from lightning_3d import ThreeDStrategy
from tests.law.models.normed import WIDTH, NormNet, scaled_features
from tests.parity import Layout, assert_same_state, fitted, whole_state
from tests.workers import WorkerPools

PIPELINE = Layout(pp=2, num_microbatches=3)


class ByMicrobatch(NormNet):
    """A norm that normalises the data, by microbatches."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.first(x))


class SeenByReplica(L.Callback):
    """A norm of its own sees each batch of this rank."""

    def __init__(self) -> None:
        self.norm = nn.BatchNorm1d(WIDTH)

    def on_train_batch_start(self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, *args: Any) -> None:
        self.norm(batch[0])


def _state(layout: Layout | None, model: Any = NormNet, **settings: Any) -> dict[str, Tensor]:
    trainer, _ = fitted(layout, model, data=scaled_features, batches=4, epochs=1, **settings)
    return whole_state(trainer)


def _statistics(state: dict[str, Tensor], prefix: str = "") -> dict[str, Tensor]:
    names = ("running_mean", "running_var", "num_batches_tracked")
    return {fqn: value for fqn, value in state.items() if fqn.startswith(prefix) and fqn.endswith(names)}


def test_normalisation_is_by_microbatch(workers: WorkerPools) -> None:
    """The statistics of the norm that does it are still those of one process."""
    (expected,) = workers(1).run(_state, None, ByMicrobatch)
    found, _ = workers(2).run(_state, PIPELINE, ByMicrobatch)
    assert_same_state([_statistics(found, "first")], _statistics(expected, "first"))
    assert not torch.allclose(found["head.weight"], expected["head.weight"], atol=1e-4)


def _with_replicas(layout: Layout) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    seen = SeenByReplica()
    return _state(layout, callbacks=[seen]), seen.norm.state_dict()


def test_statistics_are_those_of_the_first_replica(workers: WorkerPools) -> None:
    ranks = workers(4).run(_with_replicas, Layout(pp=2, dp=2, num_microbatches=2))
    for state, seen in ranks[::2]:  # of the first replica; the others' of the last step are their own
        assert_same_state([_statistics(state, "before.")], {f"before.{k}": v for k, v in _statistics(seen).items()})


class ShardedNorms(NormNet):
    """Norms inside of blocks that are sharded over tp, by channels."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 64), nn.BatchNorm1d(64), nn.GELU(), nn.Linear(64, WIDTH)) for _ in range(2)
        )

    def forward(self, x: Tensor) -> Tensor:
        for block in self.wide:
            x = block(x)
        return super().forward(x)


def _sharded(layout: Layout) -> tuple[dict[str, Tensor], str]:
    trainer, _ = fitted(layout, ShardedNorms, data=scaled_features, batches=2, epochs=1)
    assert isinstance(trainer.strategy, ThreeDStrategy)
    console = Console(width=100, file=io.StringIO(), record=True)
    console.print(trainer.strategy.plan)
    return whole_state(trainer), console.export_text()


def test_norms_on_shards(workers: WorkerPools) -> None:
    """Both layouts normalise the same microbatches, so that all is the same."""
    (expected, plan), _ = workers(2).run(_sharded, PIPELINE)
    assert "BatchNorm normalises by microbatch, its running statistics are the batch's: before and 16 more" in plan
    runs = workers(4).run(_sharded, replace(PIPELINE, tp=2))
    assert_same_state([state for state, _ in runs], expected)
    assert re.search(r"1\.weight \[64\] +│ column", runs[0][1])
