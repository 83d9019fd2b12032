"""Gradients that user code clips with torch's own functions, by any norm and by value, in every layout."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import lightning as L
import pytest
from lightning.pytorch.utilities import rank_zero_only
from torch import nn

from lightning_3d import ThreeDStrategy
from tests.models import TinyGPT
from tests.parity import Job, Layout, ReferenceRun, assert_parity, fitted, run_layout, run_reference
from tests.tables import some_in_matrix
from tests.workers import WorkerError, WorkerPools

CLIPS: dict[str, Callable[[Any], Any]] = {
    "norm 1": partial(nn.utils.clip_grad_norm_, max_norm=2.0, norm_type=1),
    "norm 2": partial(nn.utils.clip_grad_norm_, max_norm=0.1),
    "norm inf": partial(nn.utils.clip_grad_norm_, max_norm=0.01, norm_type=float("inf"), error_if_nonfinite=True),
    "value": partial(nn.utils.clip_grad_value_, clip_value=0.001),
}


class Clipped(TinyGPT):
    """Clips the gradients of one block, then those of all."""

    def __init__(self, name: str) -> None:
        super().__init__(num_layers=2)
        self.clip = CLIPS[name]
        self.norms: list[float] = []

    def configure_gradient_clipping(self, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        self.clip(self.blocks[0].parameters())
        total = self.clip(list(self.parameters()))
        self.norms.append(0.0 if total is None else float(total))

    def on_train_end(self) -> None:
        assert len(set(self.norms)) == len(self.norms) or self.norms[0] == 0.0


@cache
def _reference(name: str) -> ReferenceRun:
    return run_reference(_job(name))


def _job(name: str) -> Job:
    return Job(model=partial(Clipped, name), sees_gradients=False)


SHOWN: dict[str, Any] = {"zero_settings": {"show_gradients": "auto"}}
LAYOUTS: list[tuple[Layout, tuple[str, ...]]] = [
    (Layout(dp=2, zero=1, **SHOWN), ("norm 2", "value")),
    (Layout(dp=2, zero=3, **SHOWN), ("norm 2", "norm 1")),
    (Layout(pp=2), ("norm 2", "norm inf")),
    (Layout(tp=2), ("norm 2", "value")),
    (Layout(dp=2, zero=0, **SHOWN), ()),
    (Layout(dp=2, zero=2, **SHOWN), ()),
    (Layout(pp=2, dp=2, zero=3), ()),
    (Layout(dp=2, tp=2, zero=1, **SHOWN), ()),
]
"""Each with what `make test` clips in it."""


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        pytest.param(name, layout, id=f"{name}-{layout}", marks=[] if name in chosen else [pytest.mark.matrix])
        for name in CLIPS
        for layout, chosen in LAYOUTS
    ],
)
def test_users_clip_as_in_one_process(workers: WorkerPools, name: str, layout: Layout) -> None:
    assert_parity(_reference(name), run_layout(workers, _job(name), layout))


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
    some_in_matrix(
        itertools.product([Layout(dp=2, zero=3), Layout(pp=2), Layout(tp=2)], [True, False]),
        lambda layout, asks_strategy: asks_strategy is (layout.pp == 1),
    ),
    ids=str,
)
def test_a_norm_that_one_rank_asks_for_alone_raises(workers: WorkerPools, layout: Layout, asks_strategy: bool) -> None:
    with pytest.raises(WorkerError, match=r"rank 0 came to .*gradient.*, which takes other ranks"):
        workers(2).run(_asks_alone, layout, asks_strategy, timeout=60)
