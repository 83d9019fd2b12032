"""Blocks that drop elements, channels and probabilities of attention; (B, T, 32) -> (B, T, 32) all."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

P = 0.3


class Heads(nn.Module):
    """Projections of attention, dropout of its result and of an MLP's hidden activation; (B, T, 32) -> (B, T, 32)."""

    num_kv_heads = 4

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(32), nn.LayerNorm(32)
        self.q, self.out = nn.Linear(32, 32), nn.Linear(32, 32)
        self.k, self.v = (nn.Linear(32, 8 * self.num_kv_heads) for _ in range(2))
        self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, x: Tensor) -> Tensor:
        x = x + F.dropout(self.attention(self.norm1(x)), P, self.training)
        hidden = F.dropout(F.gelu(self.up(self.norm2(x))), P, self.training)
        return x + F.dropout(self.down(hidden), P, self.training)

    def attention(self, x: Tensor) -> Tensor:
        q, k, v = (layer(x).unflatten(-1, (-1, 8)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        y = self.attend(q, k, v, P if self.training else 0.0)
        output: Tensor = self.out(y.transpose(1, 2).flatten(2))
        return output

    def attend(self, q: Tensor, k: Tensor, v: Tensor, dropout_p: float) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, dropout_p=dropout_p, is_causal=True)


class Masked(Heads):
    """A mask, whose first row lets nothing through, and a scale."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, dropout_p: float) -> Tensor:
        mask = q.new_ones(q.shape[-2], q.shape[-2]).tril(-1).bool()
        return F.scaled_dot_product_attention(q, k, v, mask, dropout_p, scale=0.5)


class Grouped(Heads):
    """Fewer key-value heads than query heads."""

    num_kv_heads = 2

    def attend(self, q: Tensor, k: Tensor, v: Tensor, dropout_p: float) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, dropout_p=dropout_p, is_causal=True, enable_gqa=True)


class ByHand(Heads):
    """Dropout of probabilities, which lie in memory as their product left them."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, dropout_p: float) -> Tensor:
        return F.dropout((q @ k.mT / 8**0.5).softmax(-1), dropout_p) @ v


class OfTorch(nn.Module):
    """``nn.MultiheadAttention``, with or without its weights; (B, T, 32) -> (B, T, 32), (B, T, T)."""

    def __init__(self, *, need_weights: bool) -> None:
        super().__init__()
        self.need_weights = need_weights
        self.attention = nn.MultiheadAttention(32, 4, dropout=P, batch_first=True)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        output, weights = self.attention(x, x, x, need_weights=self.need_weights)
        return x + output, weights
