"""Precisions where the user's code runs backwards and steps, or looks at gradients and weights in between."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from lightning_3d import ThreeDPrecision
from tests.parity import Layout, fitted, whole_state
from tests.workers import WorkerPools

PRECISIONS = ("32-true", "bf16-true", "16-mixed", "16-true")


def _perceptron(width: int) -> nn.Module:
    return nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, width))


class Adversaries(L.LightningModule):
    """A generator and a discriminator, stepped in turn with clipped gradients, both with gradients of each loss."""

    def __init__(self, clipped_by: str, overflowing: int | None) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.generator, self.discriminator = _perceptron(8), _perceptron(1)
        self.clipped_by, self.overflowing = clipped_by, overflowing
        self.norms: list[float] = []

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        generating, judging = self.optimizers()
        generated = self.generator(batch[0].flip(1))
        overflows = batch_idx == self.overflowing and self.global_rank == 0
        self._step(generating, _loss(self.discriminator(generated), 1.0), overflows=overflows)
        generated = self.generator(batch[0].flip(1))
        self._step(judging, _loss(self.discriminator(batch[0]), 1.0) + _loss(self.discriminator(generated), 0.0))

    def _step(self, optimizer: Any, loss: Tensor, *, overflows: bool = False) -> None:
        optimizer.zero_grad()
        self.manual_backward(loss)
        own = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        if overflows:
            own[-1].grad.fill_(float("inf"))
        if self.clipped_by == "norm":
            self.norms.append(float(torch.nn.utils.clip_grad_norm_(own, 0.3)))
        self.clip_gradients(optimizer, 0.05 if self.clipped_by == "norm" else 0.005, self.clipped_by)
        optimizer.step()

    def configure_optimizers(self) -> Any:
        return [torch.optim.Adam(half.parameters(), lr=0.01, eps=1e-3) for half in (self.generator, self.discriminator)]


def _loss(judgement: Tensor, target: float) -> Tensor:
    return F.binary_cross_entropy_with_logits(judgement, torch.full_like(judgement, target))


def _noise(num_samples: int) -> TensorDataset:
    return TensorDataset(torch.randn(num_samples, 8))


def _adversaries(
    layout: Layout, precision: Any, clipped_by: str, overflowing: int | None = None
) -> tuple[dict[str, Tensor], list[float], float]:
    scaled = replace(layout, precision={"initial_scale_power": 8} if precision in ("16-mixed", "16-true") else {})
    settings: dict[str, Any] = {"batches": 3, "epochs": 1, "limit_val_batches": 0}
    make = partial(Adversaries, clipped_by, overflowing)
    trainer, model = fitted(scaled, make, data=_noise, plugins=[ThreeDPrecision(precision)], **settings)
    assert isinstance(model, Adversaries)
    assert isinstance(trainer.precision_plugin, ThreeDPrecision)
    return whole_state(trainer), model.norms, trainer.precision_plugin.loss_scale


def _all_adversaries(layout: Layout, clipped_by: str) -> list[Any]:
    return [_adversaries(layout, precision, clipped_by) for precision in PRECISIONS]


def _difference(first: dict[str, Tensor], second: dict[str, Tensor]) -> float:
    return max(float((first[name].float() - second[name].float()).abs().max()) for name in first)


@pytest.mark.parametrize(
    ("layout", "clipped_by"), [(Layout(dp=2, zero=2), "value"), (Layout(dp=2, zero=3), "norm")], ids=str
)
def test_gradients_are_clipped_and_weights_read_by_hand_as_in_fp32(
    workers: WorkerPools, layout: Layout, clipped_by: str
) -> None:
    for (weights, norms, _), *others in workers(2).run(_all_adversaries, layout, clipped_by):
        for found, found_norms, _ in others:
            assert _difference(found, weights) < 3e-3  # a stale cast, or a clipped scaled gradient, is 10 times off
            assert found_norms == pytest.approx(norms, rel=1e-2)


def test_an_overflow_that_is_clipped_by_hand_stays_one(workers: WorkerPools) -> None:
    for weights, _, scale in workers(2).run(_adversaries, Layout(dp=2), "16-mixed", "norm", 1):
        assert scale == 128.0
        assert all(bool(weight.isfinite().all()) for weight in weights.values())
