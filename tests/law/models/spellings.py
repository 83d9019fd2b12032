"""Blocks of transformers in many spellings, and odd ones; (B, T, 32) -> (B, T, 32) all."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.models import Attention, Block


def by_split(qkv: Tensor, num_heads: int) -> tuple[Tensor, ...]:
    parts = qkv.split(qkv.shape[-1] // 3, -1)
    return tuple(part.unflatten(-1, (num_heads, -1)).transpose(1, 2) for part in parts)


def by_chunk(qkv: Tensor, num_heads: int) -> tuple[Tensor, ...]:
    return tuple(part.view(*part.shape[:2], num_heads, -1).transpose(1, 2) for part in torch.chunk(qkv, 3, dim=2))


def by_slices(qkv: Tensor, num_heads: int) -> tuple[Tensor, ...]:
    width = qkv.shape[-1] // 3
    parts = qkv[..., :width], qkv[..., width : 2 * width], qkv[:, :, 2 * width :]
    return tuple(part.unflatten(-1, (num_heads, -1)).transpose(1, 2) for part in parts)


def by_view(qkv: Tensor, num_heads: int) -> tuple[Tensor, ...]:
    query, key, value = qkv.view(*qkv.shape[:2], 3, num_heads, -1).permute(2, 0, 3, 1, 4)
    return query, key, value


def by_unflatten(qkv: Tensor, num_heads: int) -> tuple[Tensor, ...]:
    parts = qkv.unflatten(-1, (3, -1)).unbind(-2)
    return tuple(part.unflatten(-1, (num_heads, -1)).transpose(1, 2) for part in parts)


def by_head(qkv: Tensor, num_heads: int) -> tuple[Tensor, ...]:
    """GPT-NeoX: each head has its query, key and value side by side."""
    return qkv.view(*qkv.shape[:2], num_heads, -1).transpose(1, 2).chunk(3, -1)


class FusedQKV(nn.Module):
    """A GPT-2 style block whose query, key and value are one projection, separated by one of many ways."""

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


class FusedGrouped(nn.Module):
    """Phi-3 style: query, key and value of unequal widths in one projection, gate and up in another."""

    def __init__(self, width: int = 32, num_heads: int = 8, num_kv_heads: int = 4) -> None:
        super().__init__()
        self.head_dim = width // num_heads
        self.widths = [width, num_kv_heads * self.head_dim, num_kv_heads * self.head_dim]
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, sum(self.widths), bias=False), nn.Linear(width, width, bias=False)
        self.gate_up, self.down = nn.Linear(width, 8 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.qkv(self.norm1(x)).split(self.widths, -1)
        q, k, v = (part.unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for part in parts)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        gate, up = self.gate_up(self.norm2(x)).chunk(2, dim=-1)
        return x + self.down(F.silu(gate) * up)


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


class MultiHead(nn.Module):
    """nn.MultiheadAttention with everything that its callers can ask for."""

    def __init__(self, *, cross: bool = False, **options: Any) -> None:
        super().__init__()
        self.cross = cross
        self.attention = nn.MultiheadAttention(32, 4, **options)

    def forward(
        self, x: Tensor, memory: Tensor, mask: Tensor | None = None, padding: Tensor | None = None, **options: Any
    ) -> tuple[Tensor, Tensor | None]:
        key = memory if self.cross else x
        return self.attention(x, key, key, key_padding_mask=padding, attn_mask=mask, **options)


class Experts(nn.Module):
    """A mixture of experts that are held as stacked weights; every expert sees as many tokens."""

    def __init__(self, width: int = 32, num_experts: int = 3) -> None:
        super().__init__()
        self.gate = nn.Linear(width, num_experts, bias=False)
        self.up = nn.Parameter(torch.randn(num_experts, width, 4 * width) / 6)
        self.up_bias = nn.Parameter(torch.randn(num_experts, 1, 4 * width))
        self.down = nn.Parameter(torch.randn(num_experts, 4 * width, width) / 12)

    def multiply(self, x: Tensor, weight: Tensor) -> Tensor:
        return torch.bmm(x, weight)

    def forward(self, x: Tensor) -> Tensor:
        scores = self.gate(x).flatten(0, 1).softmax(-1)  # [tokens, experts]
        chosen = scores.topk(8, 0).indices  # [8, experts]
        dispatched = x.flatten(0, 1)[chosen.T]  # [experts, 8, width]
        y = self.multiply(F.gelu(self.multiply(dispatched, self.up) + self.up_bias), self.down)
        weighted = y * scores.gather(0, chosen).T[..., None]
        return x + torch.zeros_like(x).flatten(0, 1).index_add(0, chosen.T.flatten(), weighted.flatten(0, 1)).view_as(x)


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


class FusedNorm(nn.Module):
    """What can't run part by part: a norm over the fused features before they are separated."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.gate_up, self.down = nn.Linear(width, 8 * width), nn.Linear(4 * width, width)
        self.norm = nn.LayerNorm(8 * width)

    def forward(self, x: Tensor) -> Tensor:
        fused = self.gate_up(x)
        gate, up = fused.chunk(2, -1)
        return self.down(F.silu(gate) * up) + self.norm(fused).mean(-1, keepdim=True)


class Matrices(nn.Module):
    """An MLP without nn.Linear: bare parameters, used transposed and by addmm."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(4 * width, width) / 6)
        self.down = nn.Parameter(torch.randn(4 * width, width) / 12)
        self.down_bias = nn.Parameter(torch.randn(width))

    def forward(self, x: Tensor) -> Tensor:
        hidden = F.gelu(x @ self.up.t()).flatten(0, 1)
        return torch.addmm(self.down_bias, hidden, self.down).view(x.shape)


class LowRank(nn.Module):
    """An MLP whose frozen first weight has a low-rank update (Hu et al. 2021, https://arxiv.org/abs/2106.09685)."""

    def __init__(self, width: int = 32, rank: int = 4) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.lora_a, self.lora_b = nn.Linear(width, rank, bias=False), nn.Linear(rank, 4 * width, bias=False)
        self.up.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.relu(self.up(x) + self.lora_b(self.lora_a(x))))


class FlatNorm(nn.Module):
    """Normalises over sharded features: only the statistics need a reduction."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.gain = nn.Parameter(torch.rand(4 * width) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.up(x)
        hidden = hidden * (hidden.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * self.gain
        return self.down(hidden)


class EagerAttention(nn.Module):
    """Attention by matmul and softmax, with a bias table for the scores."""

    def __init__(self, width: int = 32, num_heads: int = 4, length: int = 16) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.q, self.k, self.v, self.out = (nn.Linear(width, width) for _ in range(4))
        self.bias = nn.Parameter(torch.randn(num_heads, length, length))
        self.register_buffer("mask", torch.ones(length, length, dtype=torch.bool).tril())

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (p(x).unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for p in (self.q, self.k, self.v))
        scores = q @ k.transpose(-2, -1) / q.shape[-1] ** 0.5 + self.bias
        weights = scores.masked_fill(~self.mask, float("-inf")).softmax(-1)
        return self.out((weights @ v).transpose(1, 2).flatten(2))


class GroupedQuery(nn.Module):
    """Attention with fewer key/value heads than query heads and a float mask as its second argument."""

    def __init__(self, width: int = 32, num_heads: int = 4, num_kv_heads: int = 2) -> None:
        super().__init__()
        self.head_dim = width // num_heads
        self.q, self.out = nn.Linear(width, width), nn.Linear(width, width)
        self.k, self.v = (nn.Linear(width, num_kv_heads * self.head_dim) for _ in range(2))

    def forward(self, x: Tensor, mask: Tensor | None = None) -> tuple[Tensor, dict[str, Any]]:
        q, k, v = (p(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for p in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
        return x + self.out(y.transpose(1, 2).flatten(2)), {"keys": k, "length": x.shape[1]}


class InPlace(nn.Module):
    """Changes sharded, gathered and reduced tensors in place."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.gate = nn.Linear(width, 2 * width)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.up(x)
        hidden += 1
        hidden = F.relu(hidden.mul_(0.5), inplace=True)
        y = self.down(hidden)
        y += x
        gate = self.gate(x).mean(-1, keepdim=True)
        y.mul_(gate)
        return y.div_(2)


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


class Mixture(nn.Module):
    """What has no sharded form or no rule beside what has: an LSTM, a custom function, a convolution, an MLP."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.rnn = nn.LSTM(width, width, batch_first=True)
        self.conv = nn.Conv1d(width, width, 3, padding=1)
        self.gain = nn.Parameter(torch.rand(width) + 0.5)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        y = CustomScale.apply(self.rnn(x)[0] + self.conv(x.mT).mT, self.gain)
        return self.down(self.up(y).unfold(-1, 2, 2).amax(-1).repeat_interleave(2, -1))


SEPARATIONS = [by_split, by_chunk, by_slices, by_view, by_unflatten, by_head]


class FusedActivation(nn.Module):
    """An elementwise function of a fused projection, before the block cuts it into its parts."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.gate_up, self.down = nn.Linear(32, 160), nn.Linear(96, 32)
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.function(self.gate_up(x)).split([64, 96], dim=-1)
        return self.down(up * gate.mean(-1, keepdim=True))


class Biased(Attention):
    """Its causal mask is an additive float one, with a learned bias that all heads share."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__(width, num_heads)
        self.bias = nn.Parameter(torch.randn(16, 16))

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        split = (batch, length, self.num_heads, width // self.num_heads)
        q, k, v = (projection(x).view(split).transpose(1, 2) for projection in (self.q, self.k, self.v))
        mask = torch.full((length, length), float("-inf"), device=x.device).triu(1) + self.bias[:length, :length]
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        output: Tensor = self.out(y.transpose(1, 2).reshape(batch, length, width))
        return output


class BiasedBlock(Block):
    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__(width, num_heads)
        self.attention = Biased(width, num_heads)


class CheckpointedBlock(Block):
    """It checkpoints its parts, evaluation does not."""

    def forward(self, x: Tensor) -> Tensor:
        def run(part: nn.Module, y: Tensor) -> Tensor:
            return checkpoint(part, y, use_reentrant=False) if self.training else part(y)

        x = x + run(self.attention, self.norm1(x))
        return x + run(self.mlp, self.norm2(x))


class CountingBlock(Block):
    """It sets a buffer's data."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__(width, num_heads)
        self.register_buffer("scale", torch.ones(4 * width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        hidden = self.mlp[1](self.mlp[0](self.norm2(x)))
        if self.training:
            self.scale.data = 0.9 * self.scale + 0.1 * hidden.detach().abs().mean((0, 1))
        output: Tensor = x + self.mlp[2](hidden / self.scale)
        return output


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
    """A function of autograd on a shard, and one that saves it with a plain parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 32)
        self.gain = nn.Parameter(torch.rand(64) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(CustomScale.apply(Doubled.apply(self.up(x)), self.gain))


class Kept(nn.Module):
    """Keeps its hidden activation: itself, in a list, and as a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 32)
        self.hidden: Tensor | None = None
        self.listed: list[dict[str, Tensor]] = []
        self.register_buffer("mean", torch.zeros(64))

    def forward(self, x: Tensor) -> Tensor:
        self.hidden = self.up(x)
        self.listed = [{"hidden": self.hidden}]
        self.mean = 0.9 * self.mean + 0.1 * self.hidden.detach().mean((0, 1))
        return self.down(self.hidden)


class Shifted(nn.Module):
    """Two parameters whose gradients are one tensor to autograd."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 32)
        self.first, self.second = (nn.Parameter(torch.zeros(32)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x)) + self.first + self.second
