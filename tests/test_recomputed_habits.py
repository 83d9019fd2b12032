"""Habits of blocks that a recomputation must not count twice, nor leave out."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from tests.models import Regression, features
from tests.parity import Layout, assert_same_state, fitted, whole_state
from tests.tables import some_in_matrix
from tests.workers import WorkerPools

WIDTH = 16


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.second(torch.tanh(self.first(x)))
        return output


class HookingArgument(Layers):
    """Registers a hook on its argument."""

    def forward(self, x: Tensor) -> Tensor:
        if x.requires_grad:
            x.register_hook(lambda gradient: gradient * 0.5)
        return super().forward(x)


def _shift(module: nn.Module, args: Any, output: Tensor) -> None:
    output.add_(0.5)


class Shifted(Layers):
    """A hook changes the output of a layer in place, and returns nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.first.register_forward_hook(_shift)


class Drawing(Layers):
    """Draws from generators of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.of_python, self.of_numpy, self.old = random.Random(3), np.random.default_rng(4), np.random.RandomState(5)
        self.of_torch = torch.Generator().manual_seed(6)

    def forward(self, x: Tensor) -> Tensor:
        drawn = self.of_python.random() + self.of_numpy.random() + self.old.rand()
        return super().forward(x) * (drawn + torch.rand((), generator=self.of_torch))


MODELS: dict[str, type[Layers]] = {"hooks its argument": HookingArgument, "shifted": Shifted, "drawing": Drawing}


class Net(Regression):
    lr = 0.05

    def __init__(self, name: str) -> None:
        super().__init__()
        self.inlet, self.head = nn.Linear(8, WIDTH), nn.Linear(WIDTH, 4)
        self.blocks = nn.ModuleList(MODELS[name]() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        h = torch.sin(self.inlet(x))
        for block in self.blocks:
            h = block(h) + 0.3 * h
        output: Tensor = self.head(h)
        return output


def _trained(layouts: Sequence[Layout | None], name: str) -> list[dict[str, Tensor]]:
    return [whole_state(fitted(layout, lambda: Net(name), data=features, epochs=1)[0]) for layout in layouts]


@pytest.mark.parametrize(
    ("name", "base"),
    some_in_matrix(
        [(name, base) for name in MODELS for base in (Layout(), Layout(dp=2, zero=3), Layout(tp=2), Layout(pp=2))],
        lambda name, base: base.world_size > 1,
    ),
    ids=str,
)
def test_a_recomputation_draws_and_hooks_as_the_forward(workers: WorkerPools, name: str, base: Layout) -> None:
    modes = ("none", "full", "selective")
    layouts = [Layout(dp=base.dp, tp=base.tp, pp=base.pp, zero=base.zero, activations={"recompute": m}) for m in modes]
    for plain, *recomputed in workers(base.world_size).run(_trained, layouts, name):
        assert_same_state(recomputed, plain)
        if base.world_size == 1:
            assert_same_state(workers(1).run(_trained, [None], name)[0], plain)
