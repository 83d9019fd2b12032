"""Optimizers that need whole parameters step them where they are cut: as in one process, each on one rank."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Adafactor, Muon, Optimizer

from tests.law.models.spellings import FusedBlock, by_split
from tests.models import TinyGPT, tokens
from tests.optimizers import Lamb, Lars, Shampoo
from tests.parity import Layout, fitted, whole_state
from tests.workers import WorkerPools

OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    "Muon": partial(Muon, lr=1e-2),
    "Adafactor": partial(Adafactor, lr=1e-2),
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
        super().__init__(vocabulary=63, num_layers=2)
        self.blocks = nn.ModuleList(FusedBlock(32, 4, by_split) for _ in range(2))
        self.optimizer = optimizer

    def configure_optimizers(self) -> Any:
        trained = [p for p in self.parameters() if p.dim() == 2 or self.optimizer != "Muon"]
        return OPTIMIZERS[self.optimizer](trained)


def _trained(optimizer: str, layout: Layout | None) -> tuple[dict[str, Tensor], dict[str, int]]:
    trainer, module = fitted(
        layout, partial(FusedGPT, optimizer), data=partial(tokens, vocabulary=63), epochs=1, precision="64-true"
    )
    (stepped,) = trainer.optimizers
    sizes = {
        fqn: sum(value.numel() for value in stepped.state[parameter].values() if isinstance(value, Tensor))
        for fqn, parameter in module.named_parameters()
        if parameter in stepped.state
    }
    return whole_state(trainer), sizes


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_steps_as_one_process(workers: WorkerPools, optimizer: str, layout: Layout) -> None:
    expected, sizes = _trained(optimizer, None)
    initial = FusedGPT(optimizer)
    for weights, held in workers(layout.world_size).run(_trained, optimizer, layout):
        worst = max(float((weights[fqn] - value).abs().max()) for fqn, value in expected.items())
        print(optimizer, layout, worst, sum(held.values()), sum(sizes.values()))
        assert worst < 1e-8
