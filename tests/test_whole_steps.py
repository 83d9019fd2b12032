"""Optimizers that need whole parameters step them where they are cut: as in one process, each on one rank."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.optim import Adafactor, Muon, Optimizer

from tests.law.models.spellings import FusedQKV
from tests.models import TinyGPT, tokens
from tests.optimizers import Lamb, Lars, Shampoo
from tests.parity import Layout, fitted, whole_state
from tests.workers import WorkerPools

OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    "Muon": partial(Muon, lr=1e-2),
    "Adafactor": partial(Adafactor, lr=1e-2, eps=(1e-6, 1e-3)),
    "Lamb": Lamb,
    "Lars": Lars,
    "Shampoo": partial(Shampoo, lr=0.5),
}

LAYOUTS = (
    Layout(dp=2, zero=3),
    Layout(tp=2),
    Layout(pp=2, num_microbatches=2),
    Layout(dp=2, tp=2, zero=0),
    Layout(dp=2, tp=2, zero=1),
    Layout(dp=2, tp=2, zero=3),
    Layout(pp=2, dp=2, zero=1, num_microbatches=2),
    Layout(pp=2, dp=2, zero=3, num_microbatches=2),
    Layout(pp=2, tp=2, num_microbatches=2),
    Layout(dp=4, zero=3, zero_settings={"shard_size": 2}),
)


class FusedGPT(TinyGPT):
    """Has fused projections, a tied head, and a vocabulary that does not divide."""

    def __init__(self, optimizer: str) -> None:
        super().__init__(vocabulary=63, num_layers=1)
        self.blocks = nn.ModuleList(FusedQKV() for _ in range(1))
        self.optimizer = optimizer

    def configure_optimizers(self) -> Any:
        trained = [p for p in self.parameters() if p.dim() == 2 or self.optimizer != "Muon"]
        return OPTIMIZERS[self.optimizer](trained)


def _trained(optimizer: str, layout: Layout | None) -> tuple[dict[str, Tensor], int]:
    """The weights, and the elements of states that this rank has."""
    trainer, _ = fitted(
        layout,
        partial(FusedGPT, optimizer),
        data=partial(tokens, vocabulary=63),
        batches=2,
        epochs=1,
        precision="64-true",
        gradient_clip_val=0.5,
    )
    states = [value for state in trainer.optimizers[0].state.values() for value in state.values()]
    return whole_state(trainer), sum(value.numel() for value in states if isinstance(value, Tensor))


def _all_trained(layout: Layout | None) -> dict[str, tuple[dict[str, Tensor], int]]:
    return {optimizer: _trained(optimizer, layout) for optimizer in OPTIMIZERS}


@pytest.fixture(scope="module")
def expected() -> dict[str, tuple[dict[str, Tensor], int]]:
    return _all_trained(None)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_steps_as_one_process(
    workers: WorkerPools, layout: Layout, expected: dict[str, tuple[dict[str, Tensor], int]]
) -> None:
    L.seed_everything(1, verbose=False)
    initial, ranks = FusedGPT("Lamb").state_dict(), workers(layout.world_size).run(_all_trained, layout)
    for optimizer, (weights, num_states) in expected.items():
        moved = max(float((weights[fqn] - value).abs().max()) for fqn, value in initial.items())
        for of_rank, num_held in (rank[optimizer] for rank in ranks):
            parted = {fqn: float((of_rank[fqn] - value).abs().max()) for fqn, value in weights.items()}
            worst = max(parted, key=parted.get)
            print(optimizer, layout, worst, parted[worst], moved, num_held, num_states)
            assert parted[worst] < 1e-6 * moved
