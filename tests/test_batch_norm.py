"""Running statistics with a pipeline: those of one process, though every norm sees one microbatch after the other.

All norms here leave what they are given as it is, so that the weights are those of one process, too; but for those
that are there to tell that normalisation itself is by microbatch.
"""

from __future__ import annotations

import io
import re
import warnings
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import lightning as L
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from lightning.pytorch.plugins import LayerSync
from rich.console import Console
from torch import Tensor, nn
from torch.distributed.nn.functional import all_reduce
from torch.utils.checkpoint import checkpoint
from torch.utils.data import TensorDataset

from lightning_3d import ThreeDStrategy
from tests.models import TinyMLP
from tests.parity import Layout, assert_same_state, fitted, whole_state
from tests.workers import WorkerPools

WIDTH = 8
PIPELINE = Layout(pp=2, num_microbatches=3)
SCHEDULES = [replace(PIPELINE, schedule=s, num_microbatches=4) for s in ("interleaved", "interleaved_zero_bubble")]
MORE = [
    replace(PIPELINE, schedule="zbv", num_microbatches=4),
    replace(PIPELINE, schedule="gpipe", zero=3),
    replace(PIPELINE, schedule="gpipe", num_microbatches=1),
]


def features(num_samples: int) -> TensorDataset:
    """Features (WIDTH,) that are neither centred nor scaled, and targets (4,)."""
    generator = torch.Generator().manual_seed(5)
    x = 2 * torch.randn(num_samples, WIDTH, generator=generator) + 1
    return TensorDataset(x, torch.randn(num_samples, 4, generator=generator))


class Reading(nn.BatchNorm1d):
    """Calls torch's function itself, and reads the statistics before it."""

    def forward(self, x: Tensor) -> Tensor:
        assert self.running_mean is not None
        shift = self.running_mean.clone()
        if self.training:
            self.num_batches_tracked.add_(1)  # type: ignore[union-attr]
        statistics = self.running_mean, self.running_var
        return F.batch_norm(x - shift, *statistics, training=self.training, momentum=self.momentum or 0.0)


class Norms(nn.Module):
    """A layer with norms of every kind beside it, (B, WIDTH) -> (B, WIDTH)."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.norm, self.cumulative = nn.BatchNorm1d(WIDTH), nn.BatchNorm1d(WIDTH, momentum=None)
        self.twice, self.twice_cumulative = nn.BatchNorm1d(WIDTH), nn.BatchNorm1d(WIDTH, momentum=None)
        self.constant = nn.BatchNorm1d(WIDTH, momentum=0.0)
        self.untracked = nn.BatchNorm1d(WIDTH, track_running_stats=False)
        self.frozen, self.reading = nn.BatchNorm1d(WIDTH).eval(), Reading(WIDTH)
        self.images = nn.BatchNorm2d(2)
        self.instances = nn.InstanceNorm2d(2, track_running_stats=True)
        self.averaged = nn.InstanceNorm2d(2, momentum=None, track_running_stats=True)

    def forward(self, x: Tensor) -> Tensor:
        images = x.unflatten(1, (2, 2, 2))
        seen = [norm(x) for norm in (self.norm, self.cumulative, self.constant, self.untracked, self.frozen)]
        seen += [norm(y) for norm in (self.twice, self.twice_cumulative) for y in (x, 2 * x + 1)]
        seen += [self.reading(x), *(norm(images).flatten(1) for norm in (self.images, self.instances, self.averaged))]
        return torch.tanh(self.layer(x)) + 0 * sum(seen)


class Beside(nn.Module):
    """Hands on what it is given, which a norm sees."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm = norm

    def forward(self, x: Tensor) -> Tensor:
        return x + 0 * self.norm(x)


class Recomputed(nn.Module):
    """Norms under a checkpoint: in one process a recomputed call counts again."""

    def __init__(self, *, is_reentrant: bool) -> None:
        super().__init__()
        self.is_reentrant = is_reentrant
        self.layer, self.norm = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH, momentum=None)

    def _inner(self, x: Tensor) -> Tensor:
        return torch.tanh(self.layer(x)) + 0 * self.norm(x)

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self._inner, x, use_reentrant=self.is_reentrant)  # type: ignore[no-any-return]


class NormNet(L.LightningModule):
    """Norms in blocks and between them, in a block that is called first and last, and around the blocks.

    Args:
        couples: Whether its loss couples samples.
    """

    def __init__(self, couples: bool = False) -> None:
        super().__init__()
        self.couples = couples
        self.before, self.between = (nn.BatchNorm1d(WIDTH, affine=False) for _ in range(2))
        self.after = nn.BatchNorm1d(WIDTH, affine=False, momentum=None)
        self.shared = nn.Sequential(nn.Linear(WIDTH, WIDTH), Beside(nn.BatchNorm1d(WIDTH, momentum=None)))
        self.blocks = nn.ModuleList([Recomputed(is_reentrant=False), Norms(), Recomputed(is_reentrant=True)])
        self.checkpointed = nn.BatchNorm1d(WIDTH)
        self.head = nn.Linear(WIDTH, 4)
        self.num_samples = 0

    def forward(self, x: Tensor) -> Tensor:
        x = self.shared(x + 0 * self.before(x))
        for i, block in enumerate(self.blocks):
            x = block(x)
            x = x + 0 * self.between(x) if i < 2 else x
        x = x + 0 * checkpoint(self.checkpointed, x, use_reentrant=False)
        y: Tensor = self.head(self.shared(x))
        return y + 0 * self.after(torch.cat([y, y], -1))[:, :4]

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        x, targets = batch
        y = self(x)
        self.num_samples += len(x)
        self.log("spread", y.std())  # of microbatches it can't be joined
        return (y @ targets.T).log_softmax(-1).diagonal().mean().neg() if self.couples else F.mse_loss(y, targets)

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self.log("val_loss", F.mse_loss(self(batch[0]), batch[1]))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


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
    trainer, _ = fitted(layout, model, data=features, batches=4, epochs=1, **settings)
    return whole_state(trainer)


def _states(layouts: Sequence[Layout], model: Any, settings: dict[str, Any]) -> list[dict[str, Tensor]]:
    return [_state(layout, model, **settings) for layout in layouts]


def _reference(workers: WorkerPools, model: Any = NormNet, settings: Any = None) -> dict[str, Tensor]:
    """The state of one process."""
    return workers(1).run(partial(_state, None, model, **(settings or {})))[0]


def _statistics(state: dict[str, Tensor], prefix: str = "") -> dict[str, Tensor]:
    names = ("running_mean", "running_var", "num_batches_tracked")
    return {fqn: value for fqn, value in state.items() if fqn.startswith(prefix) and fqn.endswith(names)}


@pytest.mark.parametrize(
    "layouts",
    [
        pytest.param([PIPELINE, *SCHEDULES], id="schedules"),
        pytest.param(MORE, id="more", marks=pytest.mark.matrix),
    ],
)
def test_statistics_are_of_the_whole_batch(layouts: list[Layout], workers: WorkerPools) -> None:
    expected = _reference(workers)
    assert len(_statistics(expected)) == 3 * (4 + 1 + 2 + 10)
    assert expected["shared.1.norm.num_batches_tracked"] == 8, "it is called twice"
    assert expected["blocks.0.norm.num_batches_tracked"] == 8, "torch counts a recomputed call again"
    for rank_states in workers(2).run(_states, layouts, NormNet, {}):
        assert_same_state(rank_states, expected)


@pytest.mark.parametrize(
    ("model", "settings"),
    [
        (partial(NormNet, couples=True), {}),
        (NormNet, {"accumulate_grad_batches": 2}),
    ],
    ids=["whole-batch loss", "accumulating"],
)
def test_statistics_in_other_steps(model: Any, settings: dict[str, Any], workers: WorkerPools) -> None:
    expected = _reference(workers, model, settings)
    for rank_states in workers(2).run(_states, [PIPELINE], model, settings):
        assert_same_state(rank_states, expected)


def test_normalisation_is_by_microbatch(workers: WorkerPools) -> None:
    """The statistics of the norm that does it are still those of one process."""
    expected = _reference(workers, ByMicrobatch)
    ((found,), _) = workers(2).run(_states, [PIPELINE], ByMicrobatch, {})
    assert_same_state([_statistics(found, "first")], _statistics(expected, "first"))
    assert not torch.allclose(found["head.weight"], expected["head.weight"], atol=1e-4)


def _with_replicas(layout: Layout, settings: dict[str, Any]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    seen = SeenByReplica()
    return _state(layout, callbacks=[seen], **settings), seen.norm.state_dict()


@pytest.mark.parametrize(
    ("layout", "settings"),
    [
        (Layout(pp=2, dp=2, num_microbatches=2), {}),
        pytest.param(Layout(pp=2, dp=2, zero=3), {"precision": "bf16-mixed"}, marks=pytest.mark.matrix),
    ],
    ids=str,
)
def test_statistics_are_those_of_the_first_replica(
    layout: Layout, settings: dict[str, Any], workers: WorkerPools
) -> None:
    ranks = workers(4).run(_with_replicas, layout, settings)
    for state, seen in ranks[:: layout.dp]:  # of the first replica; the others' of the last step are their own
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


def _sharded(layout: Layout) -> tuple[dict[str, Tensor], list[str], str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer, _ = fitted(layout, ShardedNorms, data=features, batches=2, epochs=1)
    assert isinstance(trainer.strategy, ThreeDStrategy)
    console = Console(width=100, file=io.StringIO(), record=True)
    console.print(trainer.strategy.plan)
    return whole_state(trainer), [str(warning.message) for warning in caught], console.export_text()


@pytest.mark.parametrize("backend", [None, pytest.param("aot_eager", marks=pytest.mark.matrix)])
def test_norms_on_shards(backend: Any, workers: WorkerPools) -> None:
    """Both layouts normalise the same microbatches, so that all is the same."""
    (expected, _, plan), _ = workers(2).run(_sharded, PIPELINE)
    assert "BatchNorm normalises by microbatch, its running statistics are the batch's: before and 16 more" in plan
    runs = workers(4).run(_sharded, replace(PIPELINE, tp=2, compile_backend=backend))
    assert_same_state([state for state, _, _ in runs], expected)
    assert re.search(r"1\.weight \[64\] +│ column", runs[0][2])
    warned = [message for _, messages, _ in runs for message in messages]
    assert (backend is not None) == any("gets its running statistics" in message for message in warned), warned


class Synced(nn.BatchNorm1d):
    """Normalises by the batches of all ranks, which torch's own can't on CPUs."""

    def forward(self, x: Tensor) -> Tensor:
        size = dist.get_world_size()
        mean = all_reduce(x.mean(0)) / size
        var = all_reduce((x - mean).square().mean(0)) / size
        assert self.weight is not None
        return (x - mean) / (var + self.eps).sqrt() * self.weight + self.bias


class SyncByHand(LayerSync):
    """Takes the place of Lightning's plugin."""

    def apply(self, model: nn.Module) -> nn.Module:
        model.get_submodule("norm").__class__ = Synced
        return model

    def revert(self, model: nn.Module) -> nn.Module:
        return model


class Normalised(TinyMLP):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(8, track_running_stats=False)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.norm(x))


def _regression(num_samples: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(5)
    return TensorDataset(
        torch.randn(num_samples, 8, generator=generator), torch.randn(num_samples, 4, generator=generator)
    )


def _synced(layout: Layout | None) -> dict[str, Tensor]:
    plugins = [] if layout is None else [SyncByHand()]
    trainer, _ = fitted(layout, Normalised, data=_regression, plugins=plugins)
    return whole_state(trainer)


def test_norms_synced_over_replicas(workers: WorkerPools) -> None:
    """The Trainer's plugin converts norms before anything is sharded."""
    assert_same_state(workers(2).run(_synced, Layout(dp=2, zero=3)), workers(1).run(_synced, None)[0])
