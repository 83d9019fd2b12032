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
from tests.law.models.spellings import (
    SEPARATIONS,
    EinsumAttention,
    Experts,
    FlatNorm,
    FusedActivation,
    FusedGrouped,
    FusedLowRank,
    FusedNorm,
    FusedQKV,
    GroupedQuery,
    LowRank,
    Matrices,
    by_head,
)
from tests.models import Block

Example = tuple[nn.Module, tuple[Any, ...], dict[str, Any]]
"""A block with example arguments of its forward."""


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


def _forward_bytes(plan: BlockTensorPlan) -> int:
    return sum(collective.num_bytes for collective in plan.collectives if not collective.is_backward)


def roles(plan: BlockTensorPlan) -> dict[str, str]:
    return {weight.fqn: weight.role for weight in plan.weights}


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize(
    "block", [Block(32, 4), FusedGrouped(), *map(FusedQKV, SEPARATIONS)], ids=lambda block: type(block).__name__
)
def test_finds_megatrons_plan(block: nn.Module, size: int) -> None:
    plan = plan_block(block, (tokens(),), {}, size=size)
    assert (plan.num_all_reduces_forward, plan.num_all_reduces_backward) == (2, 2)
    assert plan.num_other_collectives_forward == 0
    assert _forward_bytes(plan) == 2 * 2 * tokens().numel() * 4 * (size - 1) // size
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


def test_key_value_heads_fewer_than_ranks_are_replicated() -> None:
    plan = plan_block(GroupedQuery(num_kv_heads=1), (tokens(),), {}, size=2)
    assert {roles(plan)[f"{name}.weight"] for name in "kv"} == {"replicate"}
    assert (roles(plan)["q.weight"], roles(plan)["out.weight"]) == ("column", "row")
    assert (plan.num_all_reduces_forward, plan.num_other_collectives_forward) == (1, 0)


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("block_class", [Experts, EinsumAttention])
def test_weights_of_three_dims(block_class: type[nn.Module], size: int) -> None:
    plan = plan_block(block_class(), (tokens(),), {}, size=size)
    assert (plan.num_all_reduces_forward, plan.num_all_reduces_backward) == (1, 1)
    assert plan.num_other_collectives_forward == 0
    assert plan.sharded_share > 0.97


def test_parts_of_fused_weights() -> None:
    plan = plan_block(FusedGrouped(), (tokens(),), {}, size=4)
    assert plan.weight("qkv.weight").parts == Parts(dim=0, sizes=(32, 16, 16), num_ranks=4)
    assert plan.weight("gate_up.bias").parts == Parts(dim=0, sizes=(128, 128), num_ranks=4)
    assert plan.weight("out.weight").parts is None
    assert plan_block(FusedQKV(by_head), (tokens(),), {}, size=2).weight("qkv.weight").parts is None
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


@pytest.mark.parametrize("function", [F.relu, F.gelu, F.silu, torch.sigmoid, torch.tanh, Tensor.square, F.mish])
def test_elementwise_functions_of_unequal_parts_stay_on_shards(function: Callable[[Tensor], Tensor]) -> None:
    plan = plan_block(FusedActivation(function), (tokens(),), {}, size=2)
    assert plan.weight("gate_up.weight").parts == Parts(dim=0, sizes=(64, 96), num_ranks=2)
    assert plan.weight("down.weight").role == "row"
    assert plan.num_other_collectives_forward == 0


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
