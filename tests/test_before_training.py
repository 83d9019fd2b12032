"""Steps that use what training makes first, data in glue, and types of all kinds, in every layout as in one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import Dataset

from lightning_3d import StepError
from lightning_3d.errors import TraceError
from tests.models import TinyMLP, features
from tests.parity import Layout, fitted
from tests.workers import WorkerPools

LAYOUTS = (Layout(pp=2), Layout(tp=2))


class Blocks(TinyMLP):
    """Two blocks and a head."""

    def __init__(self) -> None:
        super().__init__(width=8, num_layers=2)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.05)
        return [optimizer], [{"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 3), "interval": "step"}]


class Reading(Blocks):
    """Glue that reads data between blocks."""

    def forward(self, x: Tensor) -> Tensor:
        first, *between, last = self.layers
        x = first(x)
        if torch.isnan(x).any():
            raise ValueError("no number")
        x = x / max(1.0, x.abs().max().item()) + x[x > 0].mean()
        for layer in between:
            x = layer(x)
        return last(x)  # type: ignore[no-any-return]


class Fetching(Blocks):
    """A step that fetches its batches."""

    def training_step(self, dataloader_iter: Any) -> Tensor:  # type: ignore[override]
        batch, *_ = next(dataloader_iter)
        return super().training_step(batch, 0)


def _data(num_samples: int) -> Dataset[tuple[Tensor, ...]]:
    return features(num_samples)


def _refused(layout: Layout) -> list[str]:
    told = []
    for model, error in ((Reading, TraceError), (Fetching, StepError)):
        if model is Fetching or layout.pp > 1:
            with pytest.raises(error) as caught:
                fitted(layout, model, data=_data)
            told.append(str(caught.value))
    return told


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_what_remains_refused_says_the_fix(workers: WorkerPools, layout: Layout) -> None:
    for told in workers(2).run(_refused, layout):
        assert "Let it take the batch: def training_step(self, batch, batch_idx)" in told[-1]
        if layout.pp > 1:
            assert "__bool__" in told[0]
            assert "or use pipeline_parallel_size=1" in told[0]
