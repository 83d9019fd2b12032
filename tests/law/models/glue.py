"""Programs whose code outside of blocks keeps what blocks gave, on whatever stage it runs."""

from __future__ import annotations

import torch
from torch import Tensor

from tests.law.models.row import Model
from tests.models import TinyGPT
from tests.parity import Job

AFTER = {"first": (0,), "both": (0, 1), "far": (0, 3)}
"""Name of a buffer -> the blocks after which it changes."""


class Averaging(TinyGPT):
    """Notes means of activations in buffers of its own, some after blocks of several stages."""

    def __init__(self) -> None:
        super().__init__(num_layers=4)
        for name in AFTER:
            self.register_buffer(name, torch.ones(32))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        for i, block in enumerate(self.blocks):
            x = block(x)
            for name, after in AFTER.items():
                if i in after and self.training:
                    getattr(self, name).mul_(0.5).add_(x.detach().mean((0, 1)))
        logits: Tensor = self.head(self.norm(x))
        return logits


MODELS = {
    "averaging": Model(
        job=Job(model=Averaging, num_val_batches=1),
        families=frozenset({"pp"}),
        traits=frozenset({"running statistics"}),
    ),
}
