"""What a step of a pipeline gives with samples in another dimension than the first is as in one process."""

from __future__ import annotations

from typing import Any

import hypothesis
import lightning as L
import pytest
import torch
import torch.nn.functional as F
from hypothesis import strategies as st
from torch import Tensor, nn

from lightning_3d.pipeline.effects.evidence import Evidence
from tests.models import features, loader
from tests.parity import Layout, fitted
from tests.workers import WorkerError, WorkerPools

Batch = tuple[Tensor, Tensor]
PIPELINE = Layout(pp=2, num_microbatches=2)


class TimeFirst(L.LightningModule):
    """Gives (times, samples, 2); there may be as many times as samples in a microbatch."""

    def __init__(self, times: int) -> None:
        super().__init__()
        self.times = times
        self.first, self.second = nn.Linear(8, 16), nn.Linear(16, times * 2)
        self.kept: Tensor | None = None
        self.returned: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.second(self.first(x).relu()).view(len(x), self.times, 2).transpose(0, 1)
        return made

    def training_step(self, batch: Batch, batch_idx: int) -> Any:
        made = self(batch[0])
        self.kept = made.detach()
        return {"loss": F.mse_loss(made, batch[1][:, :2].expand_as(made)), "made": made.detach()}

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.returned.append(outputs["made"])

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        pass

    def predict_step(self, batch: Batch, batch_idx: int) -> tuple[Tensor, Tensor]:
        return self(batch[0]), self(batch[0]).transpose(0, 1)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def given(layout: Layout | None, times: int) -> list[Any]:
    trainer, module = fitted(layout, lambda: TimeFirst(times), data=features, batches=2, epochs=1)
    assert isinstance(module, TimeFirst)
    predicted = trainer.predict(module, loader(features(16), global_batch_size=8))
    return [predicted, module.kept, module.returned]


@pytest.mark.parametrize("times", [3, 4])
def test_samples_in_the_second_dimension(workers: WorkerPools, times: int) -> None:
    expected = given(None, times)
    assert expected[1].shape == (times, 8, 2)
    for found in workers(2).run(given, PIPELINE, times):
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)


class Carries(L.LightningModule):
    """Goes on from the hidden state of the last batch."""

    def __init__(self) -> None:
        super().__init__()
        self.recurrent, self.head = nn.GRU(8, 16, batch_first=True), nn.Linear(16, 4)
        self.hidden: Tensor | None = None

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        before = torch.zeros(1, len(batch[0]), 16) if self.hidden is None else self.hidden.detach()
        made, self.hidden = self.recurrent(batch[0].unsqueeze(1), before)
        return F.mse_loss(self.head(made).squeeze(1), batch[1])

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        pass

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def carry() -> None:
    fitted(PIPELINE, Carries, data=features)


def test_a_state_that_goes_on_by_sample_is_refused(workers: WorkerPools) -> None:
    """It is that of the whole batch, which no microbatch can go on from; its mean would fit."""
    with pytest.raises(WorkerError, match=r"Expected hidden size \(1, 4, 16\), got \[1, 8, 16\]"):
        workers(2).run(carry)


@hypothesis.given(
    st.lists(st.integers(1, 9), min_size=2, max_size=2, unique=True),
    st.integers(0, 2),
    st.lists(st.integers(1, 9), min_size=2, max_size=2),
)
def test_what_parts_of_two_sizes_show_holds(sizes: list[int], dim: int, shape: list[int]) -> None:
    """The dimension that has as many as each part has samples; it holds for parts of one size, too."""
    parts, evidence = [torch.zeros([*shape[:dim], size, *shape[dim:]]) for size in sizes], Evidence()
    assert evidence.row_dim(parts, sizes, "value") == dim
    assert evidence.row_dim(parts[:1] * 2, sizes[:1] * 2, "value") == dim
    assert evidence.row_dim([torch.zeros(6, 9)] * 2, sizes, "none") is None
    assert evidence.row_dim([torch.zeros(())] * 2, sizes[:1] * 2, "scalar") is None
