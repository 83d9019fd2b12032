"""Stage 3: weights are shards wherever hooks look, validation between steps, and what is refused."""

from __future__ import annotations

from functools import partial
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from tests.models import TinyMLP, features
from tests.parity import Layout, assert_same_state, fitted, whole_state
from tests.workers import WorkerError, WorkerPools


class _Looks(L.Callback):
    """Counts hooks, from the start of validation on, that see anything but shards."""

    def __init__(self) -> None:
        self.num_seen = self.num_gathered = 0

    def _look(self, module: L.LightningModule) -> None:
        present = [parameter for parameter in module.parameters() if not parameter.is_meta]
        self.num_seen += 1
        self.num_gathered += any(not isinstance(parameter, DTensor) for parameter in present)

    def on_validation_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *args: Any) -> None:
        self._look(pl_module)

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._look(pl_module)

    def on_before_optimizer_step(self, trainer: L.Trainer, pl_module: L.LightningModule, *args: Any) -> None:
        self._look(pl_module)


def _validated_between(layout: Layout | None) -> tuple[dict[str, Tensor], float, tuple[int, int]]:
    looks = _Looks()
    trainer, _ = fitted(layout, TinyMLP, data=features, callbacks=[looks], val_check_interval=2)
    return whole_state(trainer), float(trainer.callback_metrics["val_loss"]), (looks.num_seen, looks.num_gathered)


def test_validation_between_steps(workers: WorkerPools) -> None:
    layout = Layout(dp=2, zero=3, zero_settings={"reshard_after_forward": False, "prefetch": 2})
    weights, loss, _ = _validated_between(None)
    for trained, found, (num_seen, num_gathered) in workers(layout.world_size).run(_validated_between, layout):
        assert (num_seen > 6, num_gathered) == (True, 0)
        assert found == pytest.approx(loss, abs=1e-5)
        assert_same_state([trained], weights)


class Scaled(TinyMLP):
    """Has a number for a parameter, which can't be sharded, and reads its gradient before the optimizer's step.

    Args:
        by_hand: Whether it calls `loss.backward()` and clips itself, or changes gradients in a hook.
    """

    def __init__(self, by_hand: bool) -> None:
        super().__init__()
        self.scale, self.automatic_optimization = nn.Parameter(torch.tensor(2.0)), not by_hand

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.scale

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor | None:  # type: ignore[override]
        loss = super().training_step(batch, batch_idx)
        if self.automatic_optimization:
            return loss
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        loss.backward()
        self.clip_gradients(optimizer, gradient_clip_val=0.1, gradient_clip_algorithm="norm")
        optimizer.step()
        return None

    def on_after_backward(self) -> None:
        assert self.scale.grad is not None
        self.scale.grad.div_(1 + self.scale.grad.abs())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def _scaled(layout: Layout | None, by_hand: bool) -> dict[str, Tensor]:
    return whole_state(fitted(layout, partial(Scaled, by_hand), data=features)[0])


@pytest.mark.parametrize("by_hand", [False, True])
def test_gradients_of_numbers_are_reduced_when_they_are_read(workers: WorkerPools, by_hand: bool) -> None:
    assert_same_state(workers(2).run(_scaled, Layout(dp=2, zero=3), by_hand), _scaled(None, by_hand))


class Rectified(TinyMLP):
    """A block changes its argument in place."""

    def __init__(self) -> None:
        super().__init__()
        self.layers[2] = nn.Sequential(nn.ReLU(inplace=True), self.layers[2])


def _change_argument() -> None:
    fitted(Layout(dp=2, zero=3), Rectified, data=features)


def test_blocks_that_change_arguments_in_place_are_refused(workers: WorkerPools) -> None:
    with pytest.raises(WorkerError, match=r"StepError: layers\.2 changes an argument in place, which no block") as e:
        workers(2).run(_change_argument)
    assert e.value.failures.keys() == {0, 1}
