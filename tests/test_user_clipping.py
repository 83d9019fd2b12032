"""A norm of gradients that one rank asks for alone."""

from __future__ import annotations

from functools import partial

import lightning as L
import pytest
from lightning.pytorch.utilities import rank_zero_only
from torch import nn

from lightning_3d import ThreeDStrategy
from tests.models import TinyGPT
from tests.parity import Layout, fitted
from tests.workers import WorkerError, WorkerPools


class OnRankZero(L.Callback):
    """Asks for a norm on one rank alone."""

    def __init__(self, asks_strategy: bool) -> None:
        self.asks_strategy = asks_strategy

    @rank_zero_only
    def on_after_backward(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if self.asks_strategy:
            assert isinstance(trainer.strategy, ThreeDStrategy)
            trainer.strategy.gradient_norm()
        else:
            nn.utils.clip_grad_norm_(pl_module.parameters(), 1.0)


def _asks_alone(layout: Layout, asks_strategy: bool) -> None:
    fitted(layout, partial(TinyGPT, num_layers=2), callbacks=[OnRankZero(asks_strategy)])


@pytest.mark.parametrize(
    ("layout", "asks_strategy"),
    [(Layout(dp=2, zero=3), False), (Layout(pp=2), True), (Layout(tp=2), False)],
    ids=str,
)
def test_a_norm_that_one_rank_asks_for_alone_raises(workers: WorkerPools, layout: Layout, asks_strategy: bool) -> None:
    with pytest.raises(WorkerError, match=r"rank 0 came to .*gradient.*, which takes other ranks"):
        workers(2).run(_asks_alone, layout, asks_strategy, timeout=60)
