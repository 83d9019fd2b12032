"""Planning draws no random numbers of the training, also of Python and NumPy, which it does on one rank alone."""

from __future__ import annotations

import random
from typing import Any

import lightning as L
import numpy as np
import torch.distributed as dist
from torch import Tensor, nn

from tests.models import Block, TinyGPT
from tests.parity import Layout, fitted
from tests.workers import WorkerPools


class _Drawing(Block):
    """Draws from Python and NumPy, as layers that are left out at random do."""

    def forward(self, x: Tensor) -> Tensor:
        if random.random() < 0.3 or np.random.rand() < 0.3:
            return x
        output: Tensor = super().forward(x)
        return output


class _Model(TinyGPT):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(_Drawing(32, 4) for _ in range(2))


class _States(L.Callback):
    """Python's and NumPy's next numbers before each step."""

    def __init__(self) -> None:
        self.seen: list[tuple[float, float]] = []

    def on_train_batch_start(self, *args: Any) -> None:
        self.seen.append((random.random(), float(np.random.rand())))


def _numbers(layout: Layout) -> list[tuple[float, float]]:
    states = _States()
    random.seed(dist.get_rank())
    np.random.seed(dist.get_rank())
    fitted(layout, _Model, epochs=1, callbacks=[states])
    return states.seen


def test_ranks_draw_what_one_process_draws(workers: WorkerPools) -> None:
    (alone,) = workers(1).run(_numbers, Layout())
    assert len(set(alone)) == len(alone) > 1
    layout = Layout(tp=2, activations={"recompute": "auto", "budget": 100.0})
    assert workers(2).run(_numbers, layout) == [alone, alone]
