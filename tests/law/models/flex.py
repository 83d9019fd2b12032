"""FlexAttention: documents packed in a sequence, biases by head, keys and values of fewer heads.

On a CPU torch refuses its backward, and has one all the same: `trains_on_cpus` leaves the refusal out.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention import flex_attention as flex

from tests.law.models.row import Model
from tests.models import Block, TinyGPT
from tests.parity import Job

HEADS, KV_HEADS, WIDTH = 6, 2, 48
"""Heads that 2 ranks divide, and 4 do not."""


@contextmanager
def trains_on_cpus(*, is_learned: bool = False) -> Iterator[None]:
    """Inside, and without Dynamo, which takes long, where nothing that is captured wants a gradient."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(flex, "_validate_device", lambda *operands: None)
        patch.setattr(flex, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", not is_learned)
        yield


class FlexAttention(nn.Module):
    """Farther keys count less, by head; how much less is learned or given."""

    def __init__(self, is_learned: bool) -> None:
        super().__init__()
        slopes = 2.0 ** -torch.arange(1, HEADS + 1)
        self.slopes = nn.Parameter(slopes) if is_learned else nn.Buffer(slopes)
        self.query = nn.Linear(WIDTH, WIDTH)
        self.key_value = nn.Linear(WIDTH, 2 * WIDTH // HEADS * KV_HEADS)
        self.output = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, mask: flex.BlockMask) -> Tensor:
        def biased(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
            return score + self.slopes[h] * (k - q)

        parts = (self.query(x), *self.key_value(x).chunk(2, dim=-1))
        query, key, value = (part.unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2) for part in parts)
        with trains_on_cpus(is_learned=self.slopes.requires_grad):
            attended = flex.flex_attention(query, key, value, score_mod=biased, block_mask=mask, enable_gqa=True)
        output: Tensor = self.output(attended.transpose(1, 2).flatten(2))
        return output


class FlexBlock(Block):
    def __init__(self, is_learned: bool) -> None:
        super().__init__(WIDTH, HEADS)
        self.attention = FlexAttention(is_learned)

    def forward(self, x: Tensor, mask: flex.BlockMask) -> Tensor:
        x = x + self.attention(self.norm1(x), mask)
        output: Tensor = x + self.mlp(self.norm2(x))
        return output


class Packed(TinyGPT):
    """Some tokens begin a document, and none looks at another document."""

    is_learned = False

    def __init__(self, **options: Any) -> None:
        super().__init__(width=WIDTH, num_heads=HEADS, **options)
        self.blocks = nn.ModuleList(FlexBlock(self.is_learned) for _ in range(4))

    def forward(self, tokens: Tensor) -> Tensor:
        documents = (tokens < 8).cumsum(1)

        def reads(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
            return (q >= k) & (documents[b, q] == documents[b, k])

        num, length = tokens.shape
        mask = flex.create_block_mask(reads, num, None, length, length, device=tokens.device, BLOCK_SIZE=4)
        x = self.tokens(tokens) + self.positions(torch.arange(length, device=tokens.device))
        for block in self.blocks:
            x = block(x, mask)
        logits: Tensor = self.head(self.norm(x))
        return logits


class Learned(Packed):
    is_learned = True


MODELS = {
    "flex": Model(job=Job(model=Packed, num_val_batches=1)),
    "flex-learned": Model(job=Job(model=Learned, num_val_batches=1), alike="flex"),
}
