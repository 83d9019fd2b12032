"""Layers that replicas use at different times, or one of them alone, and gradients that come late or never."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.law.models.row import Model
from tests.models import Regression, features
from tests.parity import Job, Layout

WIDTH = 8


class _PassesFirst(torch.autograd.Function):
    """Adds, but gives the second summand no gradient."""

    @staticmethod
    def forward(ctx: Any, first: Tensor, second: Tensor) -> Tensor:
        return first + second

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return gradient, None


def _halve(parameter: Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad.mul_(0.5)


class Paths(Regression):
    """Each of two replicas takes a path of its own; one process takes those of both."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(8, WIDTH), nn.Linear(WIDTH, 4)
        self.recomputed, self.by_one = (nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3)) for _ in range(2))
        self.unheard = nn.Linear(WIDTH, WIDTH)
        self.first.bias.register_hook(lambda gradient: gradient * 3)
        self.head.bias.register_post_accumulate_grad_hook(_halve)
        self.num_steps = 0

    def forward(self, x: Tensor) -> Tensor:
        self.num_steps += self.training
        if self.trainer.world_size > 1:
            return self.path(x, self.trainer.strategy.mesh.dp_rank)  # type: ignore[attr-defined]
        return torch.stack([self.path(x[rank::2], rank) for rank in range(2)], 1).flatten(0, 1)  # as samplers deal

    def path(self, x: Tensor, rank: int) -> Tensor:
        """Checkpoints with backwards inside of the backward, two of which share a weight that is used outside, too."""
        x = self.first(x)
        for number, layer in enumerate(self.recomputed):
            if number == 1 and rank and self.num_steps % 2:
                continue
            if self.training:
                x = torch.tanh(checkpoint(layer, x, use_reentrant=True))
                x = x + checkpoint(lambda x: 0.1 * x @ self.first.weight, x, use_reentrant=True)
            else:
                x = torch.tanh(layer(x))
                x = x + 0.1 * x @ self.first.weight
        chosen = (self.num_steps + rank) % 3
        x = x if chosen == 2 else x + self.by_one[chosen](x)  # the last one nobody uses
        x = _PassesFirst.apply(x, self.unheard(x)) @ self.first.weight  # type: ignore[no-untyped-call]
        output: Tensor = self.head(x)
        return output

    def compute_loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        return (self(batch[0]) - batch[1]).square().mean()


def _by_two(layout: Layout) -> bool:
    return layout.dp == layout.world_size == 2 and layout.zero < 3  # where there are shards, hooks would be lost


RESUMED = frozenset(
    {"resumed", "resumed-folder", "lars-resumed", "shampoo-resumed"}
    | {f"{name}-resumed" for name in ("flat", "offloaded", "hybrid")}
)

MODELS = {
    "paths": Model(
        job=Job(model=Paths, data=partial(features, seed=3), num_val_batches=1),
        fits=_by_two,
        families=frozenset({"dp"}),
        skips=RESUMED,  # it counts its steps anew
    )
}
