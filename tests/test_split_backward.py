"""Schedules that compute the gradients of weights apart from those of inputs, on stages where torch can't do so as it
is: it looks for weights only along the paths from what a stage received, and detaches in place what a stage sends.
"""

from __future__ import annotations

from functools import cache, partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.models import Regression, TinyGPT, features
from tests.parity import Job, Layout, ReferenceRun, assert_parity, run_layout, run_reference
from tests.workers import WorkerPools

WIDTH = 16


class Recomputed(nn.Module):
    """A residual branch in a reentrant checkpoint, which takes no gradients of inputs alone."""

    def __init__(self) -> None:
        super().__init__()
        self.branch = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU())

    def forward(self, x: Tensor) -> Tensor:
        branch: Tensor = checkpoint(self.branch, x, use_reentrant=True) if self.training else self.branch(x)
        return x + branch


class WithMask(nn.Module):
    """Sends also what was computed of its output, which autograd saves, and a view that requires no grad."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        y = self.linear(x)
        return y, self.norm(y), torch.linspace(0, 1, WIDTH).repeat(len(y)).view_as(y)


class Chain(Regression):
    """Four layers, each a stage of its own; the first are frozen, or the middle ones recomputed."""

    def __init__(self, num_frozen: int = 0, is_recomputed: bool = False) -> None:
        super().__init__()
        middle: list[nn.Module] = [Recomputed() if is_recomputed else nn.Linear(WIDTH, WIDTH) for _ in range(2)]
        self.layers = nn.ModuleList([nn.Linear(8, WIDTH), *middle, nn.Linear(WIDTH, 4)])
        for layer in self.layers[:num_frozen]:
            layer.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers[:-1]:
            x = torch.tanh(layer(x))
        output: Tensor = self.layers[-1](x)
        return output


class Branches(Regression):
    """Each stage computes something of the batch alone, and sends it without mixing it with what it received."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, WIDTH) for _ in range(4))
        self.last = nn.Linear(WIDTH, 4)

    def forward(self, x: Tensor) -> Tensor:
        first, second, third, fourth = (torch.tanh(layer(x)) for layer in self.layers)
        output: Tensor = self.last(first * second + third * fourth)
        return output


class Stopped(Regression):
    """The last two stages read what they received without its gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(8, WIDTH), *(nn.Linear(WIDTH, WIDTH) for _ in range(2))])
        self.last = nn.Linear(WIDTH, 4)

    def forward(self, x: Tensor) -> Tensor:
        first = torch.tanh(self.layers[0](x))
        second = torch.tanh(self.layers[1](first))
        third = torch.tanh(self.layers[2](second.detach()))
        output: Tensor = self.last(third.detach())
        return output * third[:, :4] + second[:, :4]


class Masked(Regression):
    """A stage sends several tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(8, WIDTH), WithMask(), nn.Linear(WIDTH, WIDTH)])
        self.last = nn.Linear(WIDTH, 4)

    def forward(self, x: Tensor) -> Tensor:
        y, normed, mask = self.layers[1](self.layers[0](x))
        output: Tensor = self.last(self.layers[2](normed) * mask + y)
        return output


def _chain(**settings: Any) -> Job:
    return Job(model=partial(Chain, **settings), data=features)


JOBS = {
    "gpt-of-two-blocks": Job(model=partial(TinyGPT, num_layers=2)),  # sends a residual stream and its norm
    "masked": Job(model=Masked, data=features),
    "branches": Job(model=Branches, data=features),
    "stopped": Job(model=Stopped, data=features),
    "one-frozen": _chain(num_frozen=1),
    "three-frozen": _chain(num_frozen=3),
    "recomputed": _chain(is_recomputed=True),
}
STAGES = {
    "gpt-of-two-blocks": "parameters",
    "masked": ("layers.1", "layers.2", "last"),
    "stopped": ("layers.1", "layers.2", "last"),
}
EACH_LAYER = ("layers.1", "layers.2", "layers.3")
SPLITTING: Any = ("zbv", "interleaved_zero_bubble")


@cache
def _reference(name: str) -> ReferenceRun:
    return run_reference(JOBS[name])


@pytest.mark.parametrize("schedule", SPLITTING)
@pytest.mark.parametrize("name", JOBS)
def test_equals_one_process(workers: WorkerPools, name: str, schedule: Any) -> None:
    layout = Layout(pp=2, schedule=schedule, num_microbatches=4, partition=STAGES.get(name, EACH_LAYER))
    result = run_layout(workers, JOBS[name], layout)
    assert_parity(_reference(name), result, tolerance=1e-5)
    assert [len(result.plan.blocks_of(stage)) > 0 for stage in range(4)] == [True] * 4


@pytest.mark.parametrize(("name", "zero"), [("branches", 2), ("one-frozen", 3)])
def test_equals_one_process_with_replicas(workers: WorkerPools, name: str, zero: Any) -> None:
    layout = Layout(pp=2, dp=2, zero=zero, schedule="zbv", num_microbatches=2, partition=EACH_LAYER)
    assert_parity(_reference(name), run_layout(workers, JOBS[name], layout), tolerance=1e-5)
