"""Blocks of transformers as models of transformers here do not spell them, and odd ones; (B, T, 32) -> (B, T, 32)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def by_split(qkv: Tensor, num_heads: int) -> tuple[Tensor, ...]:
    parts = qkv.split(qkv.shape[-1] // 3, -1)
    return tuple(part.unflatten(-1, (num_heads, -1)).transpose(1, 2) for part in parts)


def by_view(qkv: Tensor, num_heads: int) -> tuple[Tensor, ...]:
    query, key, value = qkv.view(*qkv.shape[:2], 3, num_heads, -1).permute(2, 0, 3, 1, 4)
    return query, key, value


def by_head(qkv: Tensor, num_heads: int) -> tuple[Tensor, ...]:
    """GPT-NeoX: each head has its query, key and value side by side."""
    return qkv.view(*qkv.shape[:2], num_heads, -1).transpose(1, 2).chunk(3, -1)


class FusedQKV(nn.Module):
    """A GPT-2 style block whose query, key and value are one projection, separated in one of several ways."""

    def __init__(
        self, separate: Callable[[Tensor, int], tuple[Tensor, ...]] = by_split, width: int = 32, num_heads: int = 4
    ) -> None:
        super().__init__()
        self.separate, self.num_heads = separate, num_heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.separate(self.qkv(self.norm1(x)), self.num_heads)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm2(x))


class FusedLowRank(nn.Module):
    """A fused projection with a low-rank update of the same features, and a clamp before the split."""

    def __init__(self, width: int = 32, num_heads: int = 4) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.lora_a, self.lora_b = nn.Linear(width, 4, bias=False), nn.Linear(4, 3 * width, bias=False)
        self.qkv.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        qkv = (self.qkv(x) + self.lora_b(self.lora_a(x)) * 0.5).clamp(-2, 2)
        q, k, v = by_split(qkv, self.num_heads)
        return x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class EinsumAttention(nn.Module):
    """Attention whose projections are einsums with weights of three dims."""

    def __init__(self, width: int = 32, num_heads: int = 4) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Parameter(torch.randn(width, num_heads, width // num_heads) / 6) for _ in range(3))
        self.out = nn.Parameter(torch.randn(num_heads, width // num_heads, width) / 6)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (torch.einsum("btd,dhk->bhtk", x, weight) for weight in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + torch.einsum("bhtk,hkd->btd", y, self.out)


class CustomScale(torch.autograd.Function):
    """x * gain, with tensors saved for the backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, gain: Tensor) -> Tensor:
        ctx.save_for_backward(x, gain)
        return x * gain

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        x, gain = ctx.saved_tensors
        return gradient * gain, (gradient * x).sum(tuple(range(x.dim() - 1)))


class MLPBlock(nn.Module):
    """Without attention, whose CPU kernel has no second derivative."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = x + self.down(torch.tanh(self.up(self.norm(x))))
        return output


class Rotary(nn.Module):
    """A Llama-like block: rotary embeddings, norms and learned scales of queries and keys, a gated MLP."""

    def __init__(self, width: int = 32, num_heads: int = 4) -> None:
        super().__init__()
        self.num_heads, head_dim = num_heads, width // num_heads
        self.norm1, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.q, self.k, self.v, self.out = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.gate, self.up, self.down = nn.Linear(width, 64), nn.Linear(width, 64), nn.Linear(64, width)
        self.head_norm = nn.RMSNorm(head_dim)
        self.scale = nn.Parameter(torch.rand(num_heads, 1, 1) + 0.5)
        self.shift = nn.Parameter(torch.randn(head_dim))
        self.temperature = nn.Parameter(torch.tensor(0.7))

    def _rotate(self, x: Tensor) -> Tensor:
        x = self.head_norm(x) * self.scale + self.shift
        rows, columns = (torch.arange(size, device=x.device) for size in x.shape[-2:])
        angles = rows[:, None] / 10**columns
        first, second = x[..., : x.shape[-1] // 2], x[..., x.shape[-1] // 2 :]
        return x * angles.cos() + torch.cat((-second, first), dim=-1) * angles.sin()

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        h = self.norm1(x)
        q, k, v = (p(h).view(batch, length, self.num_heads, -1).transpose(1, 2) for p in (self.q, self.k, self.v))
        scores = self._rotate(q) @ self._rotate(k).transpose(-2, -1) * self.temperature
        mask = torch.ones(length, length, dtype=torch.bool, device=x.device).triu(1)
        y = scores.masked_fill(mask, float("-inf")).softmax(-1) @ v
        x = x + self.out(y.transpose(1, 2).contiguous().view(batch, length, -1))
        h = self.norm2(x)
        gate = F.silu(self.gate(h), inplace=True)
        gate *= self.up(h)
        gate[..., :] += 1
        return x + self.down(gate)


class Doubled(torch.autograd.Function):
    """2 x."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return 2 * x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return 2 * gradient


class Doubling(nn.Module):
    """A function of autograd on a few sharded features, and one that saves them with a plain parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 32)
        self.gain = nn.Parameter(torch.rand(4) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        heads = self.up(x).unflatten(-1, (4, 16))
        scales = CustomScale.apply(Doubled.apply(heads[..., 0]), self.gain)
        return self.down((heads * scales.unsqueeze(-1)).flatten(-2))


class Shifted(nn.Module):
    """Two parameters whose gradients are one tensor to autograd."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 32)
        self.first, self.second = (nn.Parameter(torch.zeros(32)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x)) + self.first + self.second
