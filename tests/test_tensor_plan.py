"""Finding tensor-parallel plans: pure, so everything here runs in one process without any process group."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_3d.tensor import BlockTensorPlan, plan_block
from lightning_3d.tensor.placement import Parts
from tests.models import Block

Example = tuple[nn.Module, tuple[Any, ...], dict[str, Any]]
"""A block with example arguments of its forward."""


def _by_split(qkv: Tensor, num_heads: int) -> tuple[Tensor, ...]:
    parts = qkv.split(qkv.shape[-1] // 3, -1)
    return tuple(part.unflatten(-1, (num_heads, -1)).transpose(1, 2) for part in parts)


def _by_chunk(qkv: Tensor, num_heads: int) -> tuple[Tensor, ...]:
    return tuple(part.view(*part.shape[:2], num_heads, -1).transpose(1, 2) for part in torch.chunk(qkv, 3, dim=2))


def _by_slices(qkv: Tensor, num_heads: int) -> tuple[Tensor, ...]:
    width = qkv.shape[-1] // 3
    parts = qkv[..., :width], qkv[..., width : 2 * width], qkv[:, :, 2 * width :]
    return tuple(part.unflatten(-1, (num_heads, -1)).transpose(1, 2) for part in parts)


def _by_view(qkv: Tensor, num_heads: int) -> tuple[Tensor, ...]:
    query, key, value = qkv.view(*qkv.shape[:2], 3, num_heads, -1).permute(2, 0, 3, 1, 4)
    return query, key, value


def _by_unflatten(qkv: Tensor, num_heads: int) -> tuple[Tensor, ...]:
    parts = qkv.unflatten(-1, (3, -1)).unbind(-2)
    return tuple(part.unflatten(-1, (num_heads, -1)).transpose(1, 2) for part in parts)


def _by_head(qkv: Tensor, num_heads: int) -> tuple[Tensor, ...]:
    """GPT-NeoX: each head has its query, key and value side by side."""
    return qkv.view(*qkv.shape[:2], num_heads, -1).transpose(1, 2).chunk(3, -1)


class FusedQKV(nn.Module):
    """A GPT-2 style block whose query, key and value are one projection, separated by one of many ways."""

    def __init__(
        self, separate: Callable[[Tensor, int], tuple[Tensor, ...]] = _by_split, width: int = 32, num_heads: int = 4
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
        q, k, v = _by_split(qkv, self.num_heads)
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


class EinsumExperts(Experts):
    """The same by einsum."""

    def multiply(self, x: Tensor, weight: Tensor) -> Tensor:
        return torch.einsum("etd,edf->etf", x, weight)


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


class First(nn.Module):
    """The first result of a block."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        return self.block(*args, **kwargs)[0]


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


class Hostile(nn.Module):
    """Hands its values to numpy."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.up(x)
        return self.down(hidden if hidden.detach().numpy().sum() > 0 else -hidden)


class Caching(nn.Module):
    """Keeps tensors on itself."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.register_buffer("num_calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.num_calls += 1
        self.last = self.up(x)
        return self.down(self.last)


def tokens(width: int = 32) -> Tensor:
    """The input of a block inside of a model: it needs a gradient."""
    return torch.randn(2, 16, width, requires_grad=True)


def gpt(width: int = 32, num_heads: int = 4) -> Example:
    return Block(width, num_heads), (tokens(width),), {}


def _llama(num_kv_heads: int, attention: str) -> Example:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(num_key_value_heads=num_kv_heads, attn_implementation=attention, **_sizes())
    model = transformers.LlamaModel(config)
    return model.layers[0], (tokens(),), {"position_embeddings": model.rotary_emb(tokens(), torch.arange(16)[None])}


def llama() -> Example:
    return _llama(2, "sdpa")


def llama_one_kv_head() -> Example:
    return _llama(1, "sdpa")


def llama_eager() -> Example:
    """Keys and values are repeated for their query heads by expand and reshape."""
    return _llama(2, "eager")


def llama_eager_one_kv_head() -> Example:
    return _llama(1, "eager")


def qwen3() -> Example:
    transformers = pytest.importorskip("transformers")
    config = transformers.Qwen3Config(num_key_value_heads=2, head_dim=8, **_sizes())
    model = transformers.Qwen3Model(config)
    return model.layers[0], (tokens(),), {"position_embeddings": model.rotary_emb(tokens(), torch.arange(16)[None])}


def bert() -> Example:
    transformers = pytest.importorskip("transformers")
    return transformers.BertModel(transformers.BertConfig(**_sizes())).encoder.layer[0], (tokens(),), {}


def t5() -> Example:
    transformers = pytest.importorskip("transformers")
    config = transformers.T5Config(vocab_size=100, d_model=32, d_kv=8, d_ff=64, num_layers=1, num_heads=4)
    return transformers.T5Model(config).encoder.block[0], (tokens(),), {}


def gpt2() -> Example:
    transformers = pytest.importorskip("transformers")
    return transformers.GPT2Model(transformers.GPT2Config(n_embd=32, n_layer=1, n_head=4)).h[0], (tokens(),), {}


def _sizes() -> dict[str, int]:
    return {
        "vocab_size": 100,
        "hidden_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "intermediate_size": 64,
        "max_position_embeddings": 64,
    }


def phi3() -> Example:
    transformers = pytest.importorskip("transformers")
    config = transformers.Phi3Config(num_key_value_heads=4, pad_token_id=0, **_sizes())
    model = transformers.Phi3Model(config)
    return model.layers[0], (tokens(),), {"position_embeddings": model.rotary_emb(tokens(), torch.arange(16)[None])}


def bloom() -> Example:
    """ALiBi; batch and heads in one dim.

    Without the attention weights, which would have to be gathered, and the autograd function of its own GELU.
    """
    transformers = pytest.importorskip("transformers")
    model = transformers.BloomModel(transformers.BloomConfig(vocab_size=100, hidden_size=32, n_layer=1, n_head=4))
    model.h[0].mlp.gelu_impl = nn.GELU(approximate="tanh")
    alibi = model.build_alibi_tensor(torch.ones(2, 16), 4, torch.float32)
    mask = torch.full((16, 16), -1e4).triu(1).expand(2, 1, 16, 16)
    return First(model.h[0]), (tokens(),), {"alibi": alibi, "attention_mask": mask}


def swin() -> Example:
    """Shifted windows, with a table of relative position biases that is indexed and sliced by heads."""
    transformers = pytest.importorskip("transformers")
    sizes = {"image_size": 32, "patch_size": 4, "embed_dim": 32, "depths": [2], "num_heads": [4], "window_size": 4}
    model = transformers.SwinModel(transformers.SwinConfig(**sizes))
    return First(model.encoder.layers[0].blocks[1]), (torch.randn(2, 64, 32), (8, 8)), {}


def gpt_neox() -> Example:
    transformers = pytest.importorskip("transformers")
    model = transformers.GPTNeoXModel(transformers.GPTNeoXConfig(**_sizes()))
    return model.layers[0], (tokens(),), {"position_embeddings": model.rotary_emb(tokens(), torch.arange(16)[None])}


def encoder_layer() -> Example:
    return nn.TransformerEncoderLayer(32, 4, 64, 0.0, batch_first=True), (tokens(),), {}


def decoder_layer() -> Example:
    block = nn.TransformerDecoderLayer(32, 4, 64, 0.0, batch_first=True, norm_first=True)
    mask = nn.Transformer.generate_square_subsequent_mask(16)
    return block, (tokens(), torch.randn(2, 12, 32, requires_grad=True)), {"tgt_mask": mask, "tgt_is_causal": True}


def cross_attention() -> Example:
    """Keys and values of another width, without a batch."""
    inputs = torch.randn(16, 32, requires_grad=True), torch.randn(12, 24, requires_grad=True)
    return MultiHead(cross=True, kdim=24, vdim=24), inputs, {"need_weights": False}


def attention_weights() -> Example:
    """Masks of both kinds, and the weights of every head."""
    padding = torch.tensor([[False, False, False, True], [False, False, False, False]])
    options = {"mask": torch.randn(8, 4, 4), "padding": padding, "average_attn_weights": False}
    return MultiHead(batch_first=True), tuple(torch.randn(2, 4, 32, requires_grad=True) for _ in range(2)), options


def average_attention_weights() -> Example:
    return MultiHead(cross=True, bias=False, batch_first=True), (tokens(), tokens()), {}


def fused_by(separate: Callable[[Tensor, int], tuple[Tensor, ...]]) -> Callable[[], Example]:
    def make() -> Example:
        return FusedQKV(separate), (tokens(),), {}

    make.__name__ = f"fused{separate.__name__}"
    return make


def fused_grouped() -> Example:
    return FusedGrouped(), (tokens(),), {}


ATTENTION = [encoder_layer, decoder_layer, cross_attention, attention_weights, average_attention_weights]

SEPARATIONS = [_by_split, _by_chunk, _by_slices, _by_view, _by_unflatten, _by_head]

FUSED = [*map(fused_by, SEPARATIONS), fused_grouped, gpt2, phi3, gpt_neox, bloom]
"""Blocks with fused projections."""

MEGATRON = [gpt, llama, qwen3, bert, t5, *FUSED]
"""Blocks that must reach two all-reduces forward and two backward."""


def _forward_bytes(plan: BlockTensorPlan) -> int:
    return sum(collective.num_bytes for collective in plan.collectives if not collective.is_backward)


def roles(plan: BlockTensorPlan) -> dict[str, str]:
    return {weight.fqn: weight.role for weight in plan.weights}


@pytest.mark.parametrize("make", MEGATRON)
def test_finds_megatrons_plan(make: Callable[[], Example]) -> None:
    plan = plan_block(*make(), size=2)
    # The weights of Qwen3's norms of queries and keys are read by all ranks, each for its own heads.
    assert (plan.num_all_reduces_forward, plan.num_all_reduces_backward) == (2, 4 if make is qwen3 else 2)
    assert plan.num_other_collectives_forward == 0
    assert _forward_bytes(plan) == 2 * tokens().numel() * 4  # an all-reduce over 2 ranks sends the tensor once
    assert plan.sharded_share > 0.97
    assert plan.reason is None


@pytest.mark.parametrize("size", [2, 4])
def test_columns_and_rows_of_a_block(size: int) -> None:
    plan = plan_block(*gpt(), size=size)
    columns = {
        f"{name}.{kind}"
        for name in ("attention.q", "attention.k", "attention.v", "mlp.0")
        for kind in ("weight", "bias")
    }
    assert {fqn for fqn, role in roles(plan).items() if role == "column"} == columns
    assert {fqn for fqn, role in roles(plan).items() if role == "row"} == {"attention.out.weight", "mlp.2.weight"}
    assert plan.weight("attention.q.weight").shard_dim == 0
    assert plan.weight("attention.out.weight").shard_dim == 1


def test_any_number_of_ranks_without_a_process_group_or_memory() -> None:
    with torch.device("meta"):
        block, x = Block(8192, 64), torch.empty(1, 4096, 8192)
    plan = plan_block(block, (x,), {}, size=64)
    assert (plan.num_all_reduces_forward, plan.num_other_collectives_forward) == (2, 0)
    assert not dist.is_initialized()


def test_values_and_devices_of_the_example_do_not_count() -> None:
    block, (x,), _ = gpt()
    expected = plan_block(block, (x,), {}, size=2)
    assert plan_block(Block(32, 4).to("meta"), (x.to("meta"),), {}, size=2) == expected
    assert plan_block(block, (x.requires_grad_(),), {}, size=2) == expected


def test_leaves_the_block_as_it_was() -> None:
    block, x = Caching(), tokens()
    parameters, attributes = dict(block.named_parameters()), set(vars(block))
    state = torch.random.get_rng_state()
    assert plan_block(block, (x,), {}, size=2).is_sharded
    assert all(parameter is parameters[fqn] for fqn, parameter in block.named_parameters())
    assert set(vars(block)) == attributes
    assert block.num_calls == 0
    assert torch.equal(torch.random.get_rng_state(), state)


def test_weights_that_are_no_linear_layer() -> None:
    plan = plan_block(Matrices(), (tokens(),), {}, size=2)
    assert roles(plan) == {"up": "column", "down": "row", "down_bias": "replicate"}
    assert plan.weight("up").shard_dim == 0
    assert plan.weight("down").shard_dim == 0


def test_heads_that_do_not_divide_stay_whole() -> None:
    plan = plan_block(*gpt(width=30, num_heads=3), size=2)
    assert roles(plan)["mlp.0.weight"] == "column"
    assert all(role == "replicate" for fqn, role in roles(plan).items() if fqn.startswith("attention"))
    assert plan.weight("attention.q.weight").reason == "its heads are not divisible by 2"


def test_features_that_do_not_divide_stay_whole() -> None:
    plan = plan_block(nn.Sequential(nn.Linear(8, 9), nn.GELU(), nn.Linear(9, 8)), (torch.randn(2, 8),), {}, size=2)
    assert plan.weight("0.weight").reason == "9 output features are not divisible by 2"
    assert not plan.is_sharded


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("make", [llama, llama_eager, llama_one_kv_head, llama_eager_one_kv_head])
def test_grouped_queries(make: Callable[[], Example], size: int) -> None:
    plan = plan_block(*make(), size=size)
    num_kv_heads = 1 if "one" in make.__name__ else 2
    # Keys and values that ranks share get the sum of their gradients; repeated ones are cut, so theirs is gathered.
    shared = 0 if num_kv_heads >= size else 2
    assert plan.num_all_reduces_forward == 2
    assert plan.num_other_collectives_forward == 0
    is_repeated = "eager" in make.__name__
    assert plan.num_all_reduces_backward == (2 if is_repeated else 2 + shared)
    assert plan.num_other_collectives_backward == (shared if is_repeated else 0)
    replicated = {f"self_attn.{name}_proj.weight" for name in ("k", "v")} if num_kv_heads < size else set()
    assert {weight.fqn for weight in plan.weights if weight.role == "replicate" and len(weight.shape) > 1} == replicated


def test_key_value_heads_fewer_than_ranks_are_replicated() -> None:
    plan = plan_block(GroupedQuery(num_kv_heads=1), (tokens(),), {}, size=2)
    assert {roles(plan)[f"{name}.weight"] for name in "kv"} == {"replicate"}
    assert (roles(plan)["q.weight"], roles(plan)["out.weight"]) == ("column", "row")
    assert (plan.num_all_reduces_forward, plan.num_other_collectives_forward) == (1, 0)


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("make", FUSED)
def test_fused_weights_are_sharded_part_by_part(make: Callable[[], Example], size: int) -> None:
    plan = plan_block(*make(), size=size)
    assert (plan.num_all_reduces_forward, plan.num_all_reduces_backward) == (2, 2)
    assert plan.num_other_collectives_forward == 0
    assert plan.sharded_share > 0.97


@pytest.mark.parametrize(
    ("make", "forward", "backward"),
    [(encoder_layer, 2, 2), (decoder_layer, 3, 4), (cross_attention, 1, 2), (average_attention_weights, 2, 2)],
)
@pytest.mark.parametrize("size", [2, 4])
def test_multi_head_attention(make: Callable[[], Example], forward: int, backward: int, size: int) -> None:
    plan = plan_block(*make(), size=size)
    assert (plan.num_all_reduces_forward, plan.num_all_reduces_backward) == (forward, backward)
    assert plan.num_other_collectives_forward == 0
    assert plan.sharded_share > 0.97


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("block_class", [Experts, EinsumExperts, EinsumAttention])
def test_weights_of_three_dims(block_class: type[nn.Module], size: int) -> None:
    plan = plan_block(block_class(), (tokens(),), {}, size=size)
    assert (plan.num_all_reduces_forward, plan.num_all_reduces_backward) == (1, 1)
    assert plan.num_other_collectives_forward == 0
    assert plan.sharded_share > 0.97


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("make", [t5, swin, bloom])
def test_position_biases(make: Callable[[], Example], size: int) -> None:
    plan = plan_block(*make(), size=size)
    assert (plan.num_all_reduces_forward, plan.num_all_reduces_backward) == (2, 2)
    assert plan.num_other_collectives_forward == 0
    assert plan.sharded_share > 0.96


def test_parts_of_fused_weights() -> None:
    plan = plan_block(FusedGrouped(), (tokens(),), {}, size=4)
    assert plan.weight("qkv.weight").parts == Parts(dim=0, sizes=(32, 16, 16), num_ranks=4)
    assert plan.weight("gate_up.bias").parts == Parts(dim=0, sizes=(128, 128), num_ranks=4)
    assert plan.weight("out.weight").parts is None
    assert plan_block(FusedQKV(_by_head), (tokens(),), {}, size=2).weight("qkv.weight").parts is None
    plan = plan_block(*gpt2(), size=2)
    assert plan.weight("attn.c_attn.weight").parts == Parts(dim=1, sizes=(32, 32, 32), num_ranks=2)
    plan = plan_block(FusedLowRank(), (tokens(),), {}, size=2)
    assert (
        plan.weight("qkv.weight").parts
        == plan.weight("lora_b.weight").parts
        == Parts(dim=0, sizes=(32, 32, 32), num_ranks=2)
    )


def test_fused_features_that_are_used_whole_are_not_worth_gathering() -> None:
    plan = plan_block(FusedNorm(), (tokens(),), {}, size=2)
    assert roles(plan)["gate_up.weight"] == "replicate"
    assert "all-gather" in str(plan.weight("gate_up.weight").reason)


class FusedActivation(nn.Module):
    """An elementwise function of a fused projection, before the block cuts it into its parts."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.gate_up, self.down = nn.Linear(32, 160), nn.Linear(96, 32)
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.function(self.gate_up(x)).split([64, 96], dim=-1)
        return self.down(up * gate.mean(-1, keepdim=True))


@pytest.mark.parametrize("function", [F.relu, F.gelu, F.silu, torch.sigmoid, torch.tanh, Tensor.square, F.mish])
def test_elementwise_functions_of_unequal_parts_stay_on_shards(function: Callable[[Tensor], Tensor]) -> None:
    plan = plan_block(FusedActivation(function), (tokens(),), {}, size=2)
    assert plan.weight("gate_up.weight").parts == Parts(dim=0, sizes=(64, 96), num_ranks=2)
    assert plan.weight("down.weight").role == "row"
    assert plan.num_other_collectives_forward == 0


def test_parts_that_do_not_divide_stay_whole() -> None:
    plan = plan_block(FusedQKV(width=30, num_heads=3), (tokens(30),), {}, size=4)
    assert roles(plan)["qkv.weight"] == "replicate"


def test_low_rank_update_costs_no_reduction_of_its_own() -> None:
    plan = plan_block(LowRank(), (tokens(),), {}, size=2)
    assert (roles(plan)["lora_a.weight"], roles(plan)["lora_b.weight"]) == ("replicate", "column")
    assert plan.num_all_reduces_forward == 1


def test_small_statistics_may_be_reduced() -> None:
    plan = plan_block(FlatNorm(), (tokens(),), {}, size=2)
    assert (roles(plan)["up.weight"], roles(plan)["down.weight"]) == ("column", "row")
    assert _forward_bytes(plan) == tokens().numel() * 4 + 2 * 16 * 4


def test_single_projection_is_left_alone() -> None:
    plan = plan_block(nn.Linear(32, 32), (tokens(),), {}, size=2)
    assert not plan.is_sharded
    assert "the block's output" in str(plan.reason)


def test_excluded_parameters_are_not_sharded() -> None:
    block, args, kwargs = gpt()
    assert isinstance(block, Block)
    plan = plan_block(block, args, kwargs, size=2, excluded={block.mlp[0].weight})
    assert plan.weight("mlp.0.weight").reason == "shared with code outside the block"
    assert roles(plan)["mlp.2.weight"] == "replicate"
    assert roles(plan)["attention.q.weight"] == "column"


def test_ties_have_one_decision_under_all_names() -> None:
    block = nn.Sequential(nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 32))
    block[2].weight = block[0].weight
    plan = plan_block(block, (tokens(),), {}, size=2)
    assert [weight.fqn for weight in plan.weights] == ["0.weight", "0.bias", "2.weight", "2.bias"]
    assert plan.weight("0.weight").role == plan.weight("2.weight").role


@pytest.mark.parametrize("make", [Hostile, lambda: nn.Embedding(4, 32)])
def test_a_block_that_fails_on_fake_tensors_is_left_alone(make: Callable[[], nn.Module]) -> None:
    plan = plan_block(make(), (tokens(),), {}, size=2)
    assert not plan.is_sharded
    assert "can't be followed on fake tensors" in str(plan.reason)


def test_one_rank_needs_no_plan() -> None:
    plan = plan_block(*gpt(), size=1)
    assert (plan.is_sharded, plan.sharded_share, plan.reason) == (False, 0.0, "the tp axis has one rank")


def test_prints_what_lies_where() -> None:
    lines = str(plan_block(*gpt(), size=2)).splitlines()
    assert lines[0].startswith("tensor parallel 2: 98.5% of the parameters sharded, 2 all-reduces forward, 2 backward")
    assert "  attention.q.weight    column     [32, 32] on dim 0" in lines
    assert "  norm1.weight          replicate  [32]  used by layer_norm" in lines
