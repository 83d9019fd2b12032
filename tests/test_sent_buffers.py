"""Buffers that cross stage boundaries: what is sent stays as it was, whatever further microbatches do meanwhile."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor, nn

from tests.models import Block, TinyGPT
from tests.parity import Layout, assert_same_state, fitted, whole_state
from tests.workers import WorkerPools

LAYOUTS = [
    Layout(pp=2, num_microbatches=2),
    Layout(pp=2, num_microbatches=4, schedule="gpipe"),
    Layout(pp=2, num_microbatches=4, schedule="zbv"),
]


class Averaging(TinyGPT):
    """Notes the mean of activations in its own buffer, in code outside of blocks."""

    average: Tensor

    def __init__(self, after: tuple[int, ...]) -> None:
        super().__init__(num_layers=4)
        self.after = after
        self.register_buffer("average", torch.ones(32))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1]))
        for i, block in enumerate(self.blocks):
            x = block(x)
            if i in self.after and self.training:
                self.average.mul_(0.5).add_(x.detach().mean((0, 1)))
        logits: Tensor = self.head(self.norm(x))
        return logits


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


@pytest.mark.parametrize("after", [(0,), (0, 1), (0, 3)], ids=str)
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_a_buffer_of_the_module_has_what_one_process_finds(
    workers: WorkerPools, layout: Layout, after: tuple[int, ...]
) -> None:
    model = partial(Averaging, after)
    (expected,) = workers(1).run(_trained, Layout(), model)
    assert_same_state(workers(2).run(_trained, layout, model), expected)


def test_a_buffer_that_a_block_returns_is_sent_as_it_was(workers: WorkerPools) -> None:
    layout = Layout(pp=2, num_microbatches=4, schedule="gpipe", partition=("blocks.2",))
    copied = workers(2).run(_trained, layout, partial(TellingGPT, True))
    assert_same_state(workers(2).run(_trained, layout, partial(TellingGPT, False)), copied[0])
