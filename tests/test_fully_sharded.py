"""Stage 3: weights are shards wherever hooks look, validation between steps, and what is refused."""

from __future__ import annotations

from typing import Any

import lightning as L
import pytest
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
