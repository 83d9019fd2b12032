"""A step that fetches its batches itself is refused with the fix."""

from __future__ import annotations

from typing import Any

import pytest
from torch import Tensor

from tests.models import TinyMLP, features
from tests.parity import Layout, fitted
from tests.workers import WorkerError, WorkerPools


class Fetching(TinyMLP):
    """A step that fetches its batches."""

    def training_step(self, dataloader_iter: Any) -> Tensor:  # type: ignore[override]
        batch, *_ = next(dataloader_iter)
        return super().training_step(batch, 0)


def _fit(layout: Layout) -> None:
    fitted(layout, Fetching, data=features)


@pytest.mark.parametrize("layout", [Layout(pp=2), Layout(tp=2)], ids=str)
def test_a_step_that_fetches_is_refused(workers: WorkerPools, layout: Layout) -> None:
    with pytest.raises(
        WorkerError, match=r"StepError: .*Let it take the batch: def training_step\(self, batch, batch_idx"
    ):
        workers(2).run(_fit, layout)
