"""Inline mode beside the law: how it is chosen and told of, and how its failures end."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn

from lightning_3d import ConfigError, ThreeDStrategy
from tests.law.models.inline import Carrying, Penalised
from tests.models import TinyMLP, features
from tests.parity import Layout, fitted
from tests.workers import WorkerError, WorkerPools


def _reason(model: Callable[[], L.LightningModule], mode: Any = "auto") -> str | None:
    trainer, _ = fitted(Layout(pp=2, mode=mode), model, data=features, batches=1, epochs=1)
    assert isinstance(trainer.strategy, ThreeDStrategy)
    return trainer.strategy.plan.inline


def _reasons(models: list[Callable[[], L.LightningModule]]) -> list[str | None]:
    return [_reason(model) for model in models]


def test_what_stages_can_not_follow_runs_inline_and_says_why(workers: WorkerPools) -> None:
    for reasons in workers(2).run(_reasons, [TinyMLP, Penalised]):
        assert reasons[0] is None
        assert "grad (called at" in str(reasons[1])


class _InPlace(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.relu_())


class ChangesInputs(TinyMLP):
    """A block changes what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.layers[-1] = _InPlace(32, 4)  # type: ignore[index,operator]


class Again(Penalised):
    """Takes a gradient of a gradient of a gradient."""

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        x = batch[0].clone().requires_grad_()
        y = self(x).exp().sum()
        for _ in range(3):
            (slope,) = torch.autograd.grad(y, x, create_graph=True)
            y = slope.square().sum()
        return y


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (ChangesInputs, "layers.5 changed in place an argument that requires gradients"),
        (Again, "was taken with create_graph=True, but with a pipeline ranks keep the graphs of gradients no further"),
    ],
)
def test_what_inline_mode_can_not_do_is_refused(workers: WorkerPools, model: Any, message: str) -> None:
    with pytest.raises(WorkerError, match=f"StepError: .*{message}"):
        workers(2).run(_reason, model, "inline", timeout=60)


@pytest.mark.parametrize(
    ("key", "value"), [("num_microbatches", 4), ("schedule", "gpipe"), ("loss", "sum"), ("partition", "time")]
)
def test_settings_of_microbatches_are_refused(key: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=f"pipeline.{key}={value!r} .* pipeline.mode='inline'"):
        ThreeDStrategy(pipeline_parallel_size=2, pipeline={"mode": "inline", key: value})


def _evaluated(model: Callable[[], L.LightningModule]) -> float:
    trainer, module = fitted(Layout(pp=2, mode="inline"), model, data=features, batches=2)
    (results,) = trainer.validate(module, trainer.val_dataloaders, verbose=False)
    return float(results["val_loss"])


@pytest.mark.parametrize("model", [Carrying])
def test_validation_goes_on_inline(workers: WorkerPools, model: Callable[[], L.LightningModule]) -> None:
    first, second = workers(2).run(_evaluated, model)
    assert first == second
