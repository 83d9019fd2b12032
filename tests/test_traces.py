"""A step is traced anew where what its trace depends on has changed, and only there."""

from __future__ import annotations

import lightning as L
import pytest
from torch import Tensor

from lightning_3d.trace.traced_numbers import Decisions
from tests.models import TinyMLP, features
from tests.parity import Layout, fitted
from tests.workers import WorkerError, WorkerPools


def test_decisions_are_made_again() -> None:
    decisions = Decisions()
    with decisions.noted({"step": 7, "current_epoch": 1, "global_step": 7}) as numbers:
        step = numbers["step"]
        assert (step + 1) % 2 == 0
        assert not 3 - step > 0
        assert 2 * step * 0.5 == 7.0
        assert -step < abs(-step)
        assert [0, 1][bool(step // 100)] == 0
        assert L.LightningModule().global_step == 7
    assert decisions.outcomes({"step": 7, "global_step": 7}) == (True, False, True, False, True)
    assert decisions.outcomes({"step": 108, "global_step": 0}) == (False, False, True, True, False)


class ByNumber(TinyMLP):
    """Repeats rows as often as a number says that a hook changes."""

    num_times = 1

    def on_train_epoch_start(self) -> None:
        self.num_times = 1 + self.current_epoch

    def forward(self, x: Tensor) -> Tensor:
        first, *rest = self.layers
        hidden = first(x).repeat(self.num_times, 1).view(self.num_times, len(x), -1).mean(0)
        for layer in rest:
            hidden = layer(hidden)
        return hidden  # type: ignore[no-any-return]


def _train() -> None:
    fitted(Layout(pp=2), ByNumber, data=features, batches=1)


def test_shapes_that_changed_since_the_trace_are_refused(workers: WorkerPools) -> None:
    with pytest.raises(WorkerError, match=r"it took another path .*: repeat returned a tensor of shape \(8, 32\)"):
        workers(2).run(_train)
