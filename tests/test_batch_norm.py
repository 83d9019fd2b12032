"""Norms in a pipeline: they normalise by microbatch, statistics are the first replica's, and all of it is told.

That running statistics are those of one process is the model `norms-everywhere` of tests/law.
"""

from __future__ import annotations

from typing import Any

import lightning as L
import torch
from torch import Tensor, nn

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
