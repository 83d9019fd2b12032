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
from tests.models import Block

Example = tuple[nn.Module, tuple[Any, ...], dict[str, Any]]
"""A block with example arguments of its forward."""


class FusedQKV(nn.Module):
    """A GPT-2 style block whose query, key and value are one projection, split."""

    def __init__(self, width: int = 32, num_heads: int = 4) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        parts = self.qkv(self.norm1(x)).split(x.shape[-1], -1)
        q, k, v = (part.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for part in parts)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm2(x))


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
    """Its control flow depends on values."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.up(x)
        return self.down(hidden if hidden.sum() > 0 else -hidden)


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
    return torch.randn(2, 16, width)


def gpt(width: int = 32, num_heads: int = 4) -> Example:
    return Block(width, num_heads), (tokens(width),), {}


def llama() -> Example:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(num_key_value_heads=2, **_sizes())
    model = transformers.LlamaModel(config)
    return model.layers[0], (tokens(),), {"position_embeddings": model.rotary_emb(tokens(), torch.arange(16)[None])}


def llama_one_kv_head() -> Example:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(num_key_value_heads=1, **_sizes())
    model = transformers.LlamaModel(config)
    return model.layers[0], (tokens(),), {"position_embeddings": model.rotary_emb(tokens(), torch.arange(16)[None])}


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


MEGATRON = [gpt, llama, qwen3, bert, t5]
"""Blocks that must reach two all-reduces forward and two backward."""


def roles(plan: BlockTensorPlan) -> dict[str, str]:
    return {weight.fqn: weight.role for weight in plan.weights}


@pytest.mark.parametrize("make", MEGATRON)
def test_finds_megatrons_plan(make: Callable[[], Example]) -> None:
    plan = plan_block(*make(), size=2)
    assert (plan.num_all_reduces_forward, plan.num_all_reduces_backward) == (2, 2)
    assert plan.num_other_collectives_forward == 0
    assert plan.communicated_bytes == 2 * tokens().numel() * 4  # an all-reduce over 2 ranks sends the tensor once
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
    total = sum(weight.num_elements for weight in plan.weights)
    assert plan.num_local_elements == pytest.approx(total * (1 - plan.sharded_share + plan.sharded_share / size))


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
    assert "all-gather" in str(plan.weight("attention.q.weight").reason)


def test_features_that_do_not_divide_stay_whole() -> None:
    plan = plan_block(nn.Sequential(nn.Linear(8, 9), nn.GELU(), nn.Linear(9, 8)), (torch.randn(2, 8),), {}, size=2)
    assert plan.weight("0.weight").reason == "9 output features are not divisible by 2"
    assert not plan.is_sharded


def test_key_value_heads_fewer_than_ranks_are_replicated() -> None:
    plan = plan_block(GroupedQuery(num_kv_heads=1), (tokens(),), {}, size=2)
    assert {roles(plan)[f"{name}.weight"] for name in "kv"} == {"replicate"}
    assert (roles(plan)["q.weight"], roles(plan)["out.weight"]) == ("column", "row")
    assert (plan.num_all_reduces_forward, plan.num_other_collectives_forward) == (1, 0)


def test_fused_projection_is_not_worth_gathering() -> None:
    plan = plan_block(FusedQKV(), (tokens(),), {}, size=2)
    assert roles(plan)["qkv.weight"] == "replicate"
    assert plan.weight("qkv.weight").reason == "its output would need an all-gather of 6144 bytes at split"
    assert (roles(plan)["mlp.0.weight"], roles(plan)["mlp.2.weight"]) == ("column", "row")
    assert (plan.num_all_reduces_forward, plan.num_other_collectives_forward) == (1, 0)


def test_low_rank_update_costs_no_reduction_of_its_own() -> None:
    plan = plan_block(LowRank(), (tokens(),), {}, size=2)
    assert (roles(plan)["lora_a.weight"], roles(plan)["lora_b.weight"]) == ("replicate", "column")
    assert plan.num_all_reduces_forward == 1


def test_small_statistics_may_be_reduced() -> None:
    plan = plan_block(FlatNorm(), (tokens(),), {}, size=2)
    assert (roles(plan)["up.weight"], roles(plan)["down.weight"]) == ("column", "row")
    assert plan.communicated_bytes == tokens().numel() * 4 + 2 * 16 * 4


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
