"""Optimizers that need whole parameters, each of which one data-parallel rank owns: who owns what, and what is told."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from torch import nn
from torch.optim import Optimizer

from lightning_3d import ThreeDStrategy
from lightning_3d.zero.owners import choose_owners
from tests.models import TinyMLP, features
from tests.optimizers import Lars, Lion
from tests.parity import Layout, fitted
from tests.workers import WorkerPools


def _sizes(owners: dict[nn.Parameter, int], num_ranks: int) -> list[int]:
    return [sum(parameter.numel() for parameter, owner in owners.items() if owner == rank) for rank in range(num_ranks)]


@given(st.lists(st.integers(0, 1000), min_size=1, max_size=40), st.integers(1, 8))
def test_owners_are_balanced(sizes: list[int], num_ranks: int) -> None:
    parameters = [nn.Parameter(torch.empty(size)) for size in sizes]
    owners = choose_owners(parameters, num_ranks, {})
    assert owners.keys() == {*parameters}
    assert max(_sizes(owners, num_ranks)) <= sum(sizes) / num_ranks + (1 - 1 / num_ranks) * max(sizes)


def test_owners_of_parameters_that_stages_share() -> None:
    first, second, both = [nn.Parameter(torch.empty(size)) for size in (100, 100, 60)]
    small = [nn.Parameter(torch.empty(20)) for _ in range(4)]
    stages = {first: (0,), second: (1,), both: (0, 1), **dict.fromkeys(small, (1,))}
    owners = choose_owners([first, second, both, *small], 2, stages)
    for stage in (0, 1):
        held = {parameter: owner for parameter, owner in owners.items() if stage in stages[parameter]}
        assert max(_sizes(held, 2)) <= 120


class Trained(TinyMLP):
    def __init__(self, make: Callable[[Any], Optimizer]) -> None:
        super().__init__(num_layers=2)
        self.make = make

    def configure_optimizers(self) -> Any:
        return self.make(self.parameters())


def _plan(make: Callable[[Any], Optimizer], zero: dict[str, Any]) -> tuple[str, str, str, str, str]:
    layout = Layout(dp=2, zero=2, zero_settings=zero)
    trainer, _ = fitted(layout, partial(Trained, make), data=features, batches=1, epochs=1)
    assert isinstance(trainer.strategy, ThreeDStrategy)
    (found,) = trainer.strategy.plan.optimizers
    console = Console(width=100)
    with console.capture() as printed:
        console.print(trainer.strategy.plan)
    return found.name, found.kind, found.found, found.shares, printed.get()


def test_the_plan_says_who_steps_what(workers: WorkerPools) -> None:
    *lars, printed = workers(2).run(_plan, Lars, {})[0]
    shares = "whole parameters, 8 over 2 ranks, largest share 51%"
    assert lars == ["Lars", "parameters", "tried on small tensors", shares]
    assert "tried on small tensors" in printed
    _, _, found, shares, _ = workers(2).run(_plan, Lion, {"optimizer_steps": "parameters"})[0]
    assert (found, shares[:16]) == ("set by zero.optimizer_steps", "whole parameters")
    assert workers(2).run(_plan, Lion, {})[0][3] == "rows of each parameter over 2 ranks"
