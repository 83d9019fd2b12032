"""Buffers that cross stage boundaries: what is sent stays as it was, whatever further microbatches do meanwhile."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from tests.models import Block, TinyGPT
from tests.parity import Layout, assert_same_state, fitted, whole_state
from tests.workers import WorkerPools


class Telling(Block):
    """Returns a large buffer, which each call changes, or a copy of it."""

    average: Tensor

    def __init__(self, copies: bool) -> None:
        super().__init__(32, 4)
        self.copies = copies
        self.register_buffer("average", torch.zeros(256, 256, 32))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        with torch.no_grad():
            self.average.mul_(0.5).add_(x.mean((0, 1)))
        return super().forward(x), self.average.clone() if self.copies else self.average


class TellingGPT(TinyGPT):
    def __init__(self, copies: bool) -> None:
        super().__init__(num_layers=4)
        self.blocks = nn.ModuleList([Block(32, 4), Telling(copies), Block(32, 4), Block(32, 4)])

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1]))
        x, average = self.blocks[1](self.blocks[0](x))
        logits: Tensor = self.head(self.norm(self.blocks[3](self.blocks[2](x)))) * (1.0 + average.mean())
        return logits


def _trained(layout: Layout, model: Callable[[], TinyGPT]) -> dict[str, Tensor]:
    trainer, _ = fitted(layout, model, epochs=1, limit_val_batches=0)
    return whole_state(trainer)


def test_a_buffer_that_a_block_returns_is_sent_as_it_was(workers: WorkerPools) -> None:
    layout = Layout(pp=2, num_microbatches=4, schedule="gpipe", partition=("blocks.2",))
    copied = workers(2).run(_trained, layout, partial(TellingGPT, True))
    assert_same_state(workers(2).run(_trained, layout, partial(TellingGPT, False)), copied[0])
