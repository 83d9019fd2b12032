"""Blocks that change their arguments in place, where the memory that they share can't change as in one plain process.

Where it can, they are the models `changed-arguments` and `argument-views` of tests/law.
"""

from __future__ import annotations

from collections.abc import Callable

import lightning as L
import pytest
import torch
from torch import Tensor, nn

from tests.law.models.compiled import WIDTH, Layers
from tests.models import Regression, features
from tests.parity import Layout, fitted
from tests.workers import WorkerError, WorkerPools


class OfDtypes(Layers):
    """Changes an argument of which another one shows the bytes."""

    def forward(self, x: Tensor, pair: Tensor) -> Tensor:
        pair.mul_(torch.sigmoid(self.first(x.clone()).mean()))
        return torch.tanh(self.second(x))


class DtypesNet(Regression):
    def __init__(self) -> None:
        super().__init__()
        self.inlet, self.block, self.head = nn.Linear(8, WIDTH), OfDtypes(), nn.Linear(WIDTH, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = self.inlet(x).clone()
        output: Tensor = self.head(self.block(h, torch.view_as_complex(h.view(len(h), -1, 2))))
        return output


def _trained(layout: Layout, model: Callable[[], L.LightningModule]) -> None:
    fitted(layout, model, data=features, batches=1, epochs=1)


def test_memory_that_can_not_change_as_in_one_process_is_refused(workers: WorkerPools) -> None:
    with pytest.raises(WorkerError, match=r"changes an argument in place that lies in the memory"):
        workers(1).run(_trained, Layout(activations={"recompute": "full"}), DtypesNet)
