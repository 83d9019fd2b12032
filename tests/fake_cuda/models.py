"""Blocks of what CUDA has kernels for, in models of the kind of ``tests.architectures``."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.flex_attention import flex_attention

from tests.architectures import LENGTH, NUM_CLASSES, WIDTH, Trained

NUM_HEADS = 4


class Decoder(nn.Module):
    """Grouped queries, RMS norms and a gated product, as Llama has them."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.dropout = dropout
        self.norm1, self.norm2 = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.q, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.k, self.v = nn.Linear(WIDTH, WIDTH // 2), nn.Linear(WIDTH, WIDTH // 2)
        self.gate, self.up, self.down = nn.Linear(WIDTH, 32), nn.Linear(WIDTH, 32), nn.Linear(32, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm1(x)
        q, k, v = (p(h).unflatten(-1, (-1, WIDTH // NUM_HEADS)).transpose(1, 2) for p in (self.q, self.k, self.v))
        x = x + F.dropout(self.out(self.attend(q, k, v).transpose(1, 2).flatten(2)), self.dropout)
        h = self.norm2(x)
        output: Tensor = x + self.down(F.silu(self.gate(h)) * self.up(h))
        return output

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Of heads at dim 1."""
        return F.scaled_dot_product_attention(q, k, v, dropout_p=self.dropout, is_causal=True, enable_gqa=True)


class Flex(Decoder):
    """With FlexAttention, whose backward CPUs do not have."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        attended = flex_attention(q, k, v, enable_gqa=True)
        assert isinstance(attended, Tensor)
        return attended


class Experts(nn.Module):
    """A product per expert, for tokens in the order of experts."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, 4)
        self.up = nn.Parameter(torch.randn(4, WIDTH, 32) * 0.1)
        self.down = nn.Parameter(torch.randn(4, 32, WIDTH) * 0.1)

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, 1)
        scores, chosen = self.router(tokens).softmax(-1).max(-1)
        order = chosen.argsort()
        ends = F.one_hot(chosen, 4).sum(0).cumsum(0).to(torch.int32)
        hidden = F.silu(F.grouped_mm(tokens[order].bfloat16(), self.up.bfloat16(), offs=ends))
        output = F.grouped_mm(hidden, self.down.bfloat16(), offs=ends).to(x.dtype) * scores[order, None]
        return x + torch.zeros_like(tokens).index_add(0, order, output).view_as(x)


class Encoder(nn.TransformerEncoderLayer):
    """torch's own, without dropout."""

    def __init__(self) -> None:
        super().__init__(WIDTH, NUM_HEADS, 32, dropout=0.0, batch_first=True)


class Blocks(Trained):
    """Two blocks of a class."""

    def __init__(self, block: type[nn.Module], **settings: float) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(block(**settings) for _ in range(2))
        self.head = nn.Linear(WIDTH, NUM_CLASSES)

    def compute_loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        x, targets = batch
        assert x.shape[1] == LENGTH
        for block in self.blocks:
            x = block(x)
        return F.mse_loss(self.head(x).float(), targets)
