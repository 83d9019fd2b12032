"""Layers that replicas use at different times, or one of them alone, and gradients that come late or never."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.law.models.row import Model
from tests.models import Regression, features
from tests.parity import Job, Layout

WIDTH = 16


class _PassesFirst(torch.autograd.Function):
    """Adds, but gives the second summand no gradient."""

    @staticmethod
    def forward(ctx: Any, first: Tensor, second: Tensor) -> Tensor:
        return first + second

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return gradient, None


def _run(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    return function(x)


def _halve(parameter: Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad.mul_(0.5)


class Paths(Regression):
    """Each of two replicas takes a path of its own; one process takes those of both."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.unheard = nn.Linear(8, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.by_one, self.recomputed = (nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3)) for _ in range(2))
        self.last, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 4)  # which have gradients first
        self.first.bias.register_hook(lambda gradient: gradient * 3)
        self.head.bias.register_post_accumulate_grad_hook(_halve)
        self.num_steps = 0

    def forward(self, x: Tensor) -> Tensor:
        self.num_steps += self.training
        if self.trainer.world_size > 1:
            return self.path(x, self.trainer.strategy.mesh.dp_rank)  # type: ignore[attr-defined]
        return torch.stack([self.path(x[rank::2], rank) for rank in range(2)], 1).flatten(0, 1)  # as samplers deal

    def path(self, x: Tensor, rank: int) -> Tensor:
        """Checkpoints with backwards inside of the backward, half of which share a weight that is used outside, too."""
        x = self.first(x)
        run = partial(checkpoint, use_reentrant=True) if self.training else _run
        for number, layer in enumerate(self.recomputed):
            if number == 1 and rank and self.num_steps % 2:
                continue
            x = torch.tanh(run(layer, x))
            x = x + run(lambda x: 0.1 * x @ self.last.weight, x)
        chosen = (self.num_steps + rank) % 3
        x = x if chosen == 2 else x + self.by_one[chosen](x)  # the last one nobody uses
        x = _PassesFirst.apply(x, self.unheard(x))  # type: ignore[no-untyped-call]
        output: Tensor = self.head(torch.tanh(self.last(x)))
        return output

    def compute_loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        return (self(batch[0]) - batch[1]).square().mean()


def _by_two(layout: Layout) -> bool:
    return layout.dp == layout.world_size == 2 and layout.zero < 3  # where there are shards, hooks would be lost


RESUMED = frozenset(
    {"resumed", "resumed-folder", "shampoo-resumed"} | {f"{name}-resumed" for name in ("offloaded", "hybrid")}
)

MODELS = {
    "paths": Model(
        job=Job(model=Paths, data=partial(features, seed=3), num_val_batches=1),
        fits=_by_two,
        families=frozenset({"dp"}),
        skips=RESUMED,  # it counts its steps anew
    )
}
