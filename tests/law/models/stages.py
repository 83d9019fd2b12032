"""Models whose layers are a stage each, for schedules that compute gradients of weights apart from those of inputs.

Torch looks for weights only along the paths from what a stage received, and detaches in place what a stage sends.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.law.models.row import Model
from tests.models import Regression, TinyGPT, features
from tests.parity import Job

WIDTH = 16


class Recomputed(nn.Module):
    """A residual branch in a reentrant checkpoint, which takes no gradients of inputs alone."""

    def __init__(self) -> None:
        super().__init__()
        self.branch = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU())

    def forward(self, x: Tensor) -> Tensor:
        branch: Tensor = checkpoint(self.branch, x, use_reentrant=True) if self.training else self.branch(x)
        return x + branch


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


def _row(model: Any, **settings: Any) -> Model:
    job = Job(model=partial(model, **settings), data=features, num_val_batches=1)
    return Model(job=job, alike="odd-blocks")


MODELS = {
    "gpt-of-two-blocks": Model(job=Job(model=partial(TinyGPT, num_layers=2)), alike="gpt"),
    "frozen-stages": _row(Chain, num_frozen=3),
    "recomputed-stages": _row(Chain, is_recomputed=True),
}
"""The first sends a residual stream."""
