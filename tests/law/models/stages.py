"""Models whose layers are a stage each, for schedules that compute gradients of weights apart from those of inputs.

Torch looks for weights only along the paths from what a stage received, and detaches in place what a stage sends.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from tests.law.models.blocks import WIDTH, Checkpointing
from tests.law.models.row import Model
from tests.models import Regression, TinyGPT, features
from tests.parity import Job


class Chain(Regression):
    """Four layers, each a stage of its own; the first are frozen, or the middle ones recomputed."""

    def __init__(self, num_frozen: int = 0, is_recomputed: bool = False) -> None:
        super().__init__()
        make = partial(Checkpointing, True) if is_recomputed else partial(nn.Linear, WIDTH, WIDTH)
        self.layers = nn.ModuleList([nn.Linear(8, WIDTH), make(), make(), nn.Linear(WIDTH, 4)])
        for layer in self.layers[:num_frozen]:
            layer.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers[:-1]:
            x = torch.tanh(layer(x))
        output: Tensor = self.layers[-1](x)
        return output


class Transposing(Regression):
    """What its layers give lies across in memory, and code between them goes by that."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([_Transposed() for _ in range(4)])
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = x.unsqueeze(2) * x.unsqueeze(1)
        for layer in self.layers:
            x = torch.tanh(layer(x))
            if not x.is_contiguous():
                x = 0.5 * x.contiguous()
        output: Tensor = self.head(x.mean(1))
        return output


class _Transposed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).mT  # type: ignore[no-any-return]


def _row(model: Any, **settings: Any) -> Model:
    job = Job(model=partial(model, **settings), data=features, num_val_batches=1)
    return Model(job=job, alike="odd-blocks")


MODELS = {
    "gpt-of-two-blocks": Model(job=Job(model=partial(TinyGPT, num_layers=2)), alike="gpt"),
    "frozen-stages": _row(Chain, num_frozen=3),
    "recomputed-stages": _row(Chain, is_recomputed=True),
    "transposing": Model(job=Job(model=Transposing, data=features, num_val_batches=1)),
}
"""The first sends a residual stream."""
