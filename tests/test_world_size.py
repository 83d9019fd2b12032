"""User code that asks how many processes there are, and means the replicas: learning rates and samplers."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch

from tests.models import TinyGPT
from tests.parity import Layout, fitted
from tests.workers import WorkerPools

LAYOUTS = {"dp2": Layout(dp=2), "pp2": Layout(pp=2)}


class Scaled(TinyGPT):
    """Scales its learning rate by what counts as replicas under DDP."""

    def __init__(self) -> None:
        super().__init__(num_layers=2)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01 * self.trainer.world_size)

    def on_fit_start(self) -> None:
        self.batch_size = 8 // self.trainer.strategy.num_processes  # type: ignore[attr-defined]


def _warned(layout: Layout | None) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fitted(layout, Scaled, epochs=1)
    return [str(warning.message) for warning in caught if "at a time have different samples" in str(warning.message)]


@pytest.mark.parametrize("name", LAYOUTS)
def test_user_code_that_counts_all_ranks_is_warned(workers: WorkerPools, name: str) -> None:
    on_first, on_second = workers(2).run(_warned, LAYOUTS[name])
    assert on_second == []
    if name == "dp2":
        assert on_first == []
    else:
        for read in ("world_size", "num_processes"):
            assert any(f"reads {read}, which counts all 2 ranks; 1 of them" in said for said in on_first)
        assert all("test_world_size.py:" in said for said in on_first)
