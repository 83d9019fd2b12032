"""Finding tensor-parallel plans: pure, so everything here runs in one process without any process group.

The blocks are those of tests/law, which trains them and compares what they send with their plans.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_3d.tensor import BlockTensorPlan, plan_block
from lightning_3d.tensor.plan.planned_axis import PlannedCollective
from lightning_3d.tensor.plan.record import record_block
from lightning_3d.tensor.plan.replay import replay
from lightning_3d.tensor.plan.simulate import Choice, Terms, simulate_block
from lightning_3d.tensor.vocabulary.weight_roles import find_vocabulary, with_vocabulary
from tests.law.models import tensor as law
from tests.law.models.spellings import Doubled
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


class Using(nn.Module):
    """Calls a function with what may lie on shards."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.up, self.down, self.function = nn.Linear(32, 64), nn.Linear(64, 32), function

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.function(self.up(x)))


def _hooked(x: Tensor) -> Tensor:
    x.register_hook(lambda gradient: 2 * gradient)
    return x


def tokens(width: int = 32) -> Tensor:
    """The input of a block inside of a model: it needs a gradient."""
    return torch.randn(2, 16, width, requires_grad=True)


def gpt(width: int = 32, num_heads: int = 4) -> Example:
    return Block(width, num_heads), (tokens(width),), {}


def _blocks() -> dict[str, tuple[nn.Module, Tensor]]:
    """Blocks of tests/law with what they get."""
    images, sequence = torch.randn(2, 16, 4, 4, requires_grad=True), torch.randn(2, 12, 16, requires_grad=True)
    return {
        **{name: (block, tokens()) for room in (law.matrices, law.mixtures) for name, block in room().items()},
        **{f"conv_{name}": (block, images) for name, block in law.images().items()},
        **{name: (block, sequence) for name, block in law.sequences().items()},
    }


PLANNED: dict[str, tuple[int, int, int, float]] = {
    **{"by_view": (2, 2, 0, 0.97), "by_head": (2, 2, 0, 0.97), "low_rank": (1, 2, 0, 0.96), "linear": (0, 0, 0, 0.0)},
    "by_number": (3, 1, 0, 0.9),
    "by_mask": (4, 4, 0, 0.9),  # as if every expert were hit, and the one that marks padding
    **{"top_two": (1, 1, 0, 0.9), "of_modules": (3, 3, 0, 0.9), "branching": (3, 1, 1, 0.9)},
    **dict.fromkeys(("conv_resnext", "conv_resampling", "conformer"), (1, 1, 1, 0.95)),
}
"""Block -> all-reduces in the forward and in the backward, other collectives in the forward (statistics of norms), and
the least share of parameters that is sharded."""


def _counts(plan: BlockTensorPlan) -> tuple[int, int, int]:
    return plan.num_all_reduces_forward, plan.num_all_reduces_backward, plan.num_other_collectives_forward


@pytest.fixture(scope="module")
def plans() -> dict[str, BlockTensorPlan]:
    torch.manual_seed(0)
    return {name: plan_block(block, (x,), {}, size=2) for name, (block, x) in _blocks().items()}


@pytest.mark.parametrize("name", PLANNED)
def test_what_blocks_send_and_share(plans: dict[str, BlockTensorPlan], name: str) -> None:
    *counts, share = PLANNED[name]
    assert _counts(plans[name]) == tuple(counts), plans[name]
    assert share <= plans[name].sharded_share, plans[name]


def _communicated(caused: PlannedCollective) -> tuple[str, int, list[str]]:
    return caused.collective.kind, caused.collective.num_bytes, sorted(caused.cause.sources)


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("name", ["by_view", "low_rank", "by_mask", "branching", "conformer", "conv_resnext"])
def test_a_replay_tells_what_a_run_communicates(name: str, sequence_parallel: bool) -> None:
    block, x = _blocks()[name]
    record = record_block(block, (x,), {})
    column = next(fqn for fqn, parameter in block.named_parameters() if parameter.dim() > 1)
    for replicated in ({}, {column: "by hand"}, {}):  # the last one from what the first one answered
        choice, terms = Choice(replicated=replicated), Terms(size=2, sequence_parallel=sequence_parallel)
        told = replay(record, choice=choice, terms=terms)
        ran = simulate_block(block, (x,), {}, choice=choice, terms=terms)
        for one, other in ((told.forward, ran.forward), (told.backward, ran.backward)):
            assert sorted(map(_communicated, one)) == sorted(map(_communicated, other))
        assert replace(told, forward=(), backward=()) == replace(ran, forward=(), backward=())


REASONS: dict[str, tuple[Callable[[], nn.Module], Tensor, dict[str, Any], dict[str, str]]] = {
    "heads": (lambda: Block(30, 1), tokens(30), {}, {"attention.q.weight": "it has fewer heads than 2"}),
    "features": (
        lambda: nn.Sequential(nn.Linear(8, 9), nn.GELU(), nn.Linear(9, 8)),
        tokens(8),
        {},
        {"0.weight": "9 output features are not divisible by 2"},
    ),
    "groups": (
        lambda: nn.Sequential(nn.Conv2d(6, 6, 1), nn.Conv2d(6, 6, 1, groups=3)),
        torch.randn(2, 6, 4, 4),
        {"by_hand": {"0.weight": "column"}},
        {"1.weight": "3 groups are not divisible by 2"},
    ),
    "depthwise": (
        lambda: nn.Sequential(nn.Conv2d(16, 16, 3, padding=1, groups=16), nn.Conv2d(16, 16, 1)),
        torch.randn(2, 16, 4, 4),
        {},
        {"0.weight": "its input channels are not sharded"},
    ),
    "depthwise row": (
        lambda: nn.Sequential(nn.Conv2d(16, 16, 3, padding=1, groups=16), nn.Conv2d(16, 16, 1)),
        torch.randn(2, 16, 4, 4),
        {"by_hand": {"0.weight": "row"}},
        {"0.weight": "its groups can't be sharded on their input channels"},
    ),
    "by hand": (
        lambda: Block(32, 4),
        tokens(),
        {"by_hand": {"mlp.0.weight": "replicate"}},
        {"mlp.0.weight": "by tensor.plan"},
    ),
    "custom function": (lambda: Using(Doubled.apply), tokens(), {}, {"up.weight": "an all-gather of"}),
    "hook": (lambda: Using(_hooked), tokens(), {}, {"up.weight": "register_hook changes"}),
    "router": (
        lambda: law.mixtures()["scattered"],
        tokens(),
        {},
        {"gate.weight": "scatter_ changes its output in place and has no sharded form"},
    ),
}
"""Block, what it gets, options of planning -> reasons of weights that stay whole."""


@pytest.mark.parametrize("name", REASONS)
def test_weights_that_stay_whole_say_why(name: str) -> None:
    make, x, options, reasons = REASONS[name]
    plan = plan_block(make(), (x.requires_grad_(),), {}, size=2, **options)
    for fqn, reason in reasons.items():
        assert plan.weight(fqn).role == "replicate"
        assert reason in str(plan.weight(fqn).reason)


def test_excluded_and_tied_parameters() -> None:
    block, args, kwargs = gpt()
    assert isinstance(block, Block)
    plan = plan_block(block, args, kwargs, size=2, excluded={block.mlp[0].weight})
    assert plan.weight("mlp.0.weight").reason == "shared with code outside the block"
    assert (plan.weight("mlp.2.weight").role, plan.weight("attention.q.weight").role) == ("replicate", "column")
    tied = nn.Sequential(nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 32))
    tied[2].weight = tied[0].weight
    plan = plan_block(tied, (tokens(),), {}, size=2)
    assert [weight.fqn for weight in plan.weights] == ["0.weight", "0.bias", "2.weight", "2.bias"]
    assert plan.weight("0.weight").role == plan.weight("2.weight").role


@pytest.mark.parametrize(
    ("make", "size", "reason"),
    [
        (Hostile, 2, "can't be followed on fake tensors"),
        (lambda: nn.Embedding(4, 32), 2, "can't be followed on fake tensors"),
        (lambda: nn.Linear(32, 32), 2, "the block's output"),
        (lambda: Block(32, 4), 1, "the tp axis has one rank"),
    ],
)
def test_blocks_that_are_left_alone_say_why(make: Callable[[], nn.Module], size: int, reason: str) -> None:
    plan = plan_block(make(), (tokens(),), {}, size=size)
    assert (plan.is_sharded, plan.sharded_share) == (False, 0.0)
    assert reason in str(plan.reason)


def test_input_that_can_not_be_cut_is_left_whole() -> None:
    plan = plan_block(Block(32, 4), (torch.randn(2, 1, 32),), {}, size=2, sequence_parallel=True)
    assert not plan.is_sequence_parallel
    assert plan.num_all_reduces_forward == plan.num_all_reduces_backward == 2


def _table_role(table: nn.Embedding, size: int = 2) -> str:
    ids = torch.empty(2, 8, dtype=torch.int64, device="meta")
    use = find_vocabulary(table, (ids,), {}, size=size, logits=None)
    rest = plan_block(table, (ids,), {}, size=size, excluded=[table.get_parameter(fqn) for fqn in use.fqns])
    return with_vocabulary(rest, use).weight("weight").role


def test_tables_that_can_be_cut() -> None:
    assert _table_role(nn.Embedding(64, 16)) == "vocabulary"
    assert _table_role(nn.Embedding(63, 16, padding_idx=0), size=4) == "vocabulary"
    assert _table_role(nn.Embedding(8, 16)) == "replicate"  # smaller than the matrices of a block
    assert _table_role(nn.Embedding(5, 2), size=4) == "replicate"  # nothing would be left for the last rank
    for option in ({"max_norm": 1.0}, {"sparse": True}, {"scale_grad_by_freq": True}):
        assert _table_role(nn.Embedding(64, 16, **option)) == "replicate"
