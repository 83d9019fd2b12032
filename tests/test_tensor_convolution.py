"""Convolution stacks are sharded by channels: the plans that are found, and the values of one process."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn

from lightning_3d.tensor import BlockTensorPlan, plan_block
from lightning_3d.tensor.plan.block_plan import Role
from tests.architectures import InvertedResidual
from tests.law.models.convolutions import (
    Basic,
    Bottleneck,
    Conformer,
    Conv1dStack,
    ConvAttention,
    DepthwiseMLP,
    FusedConvAttention,
    GatedDepthwise,
    LinearAttention,
    Next,
    OneHead,
    Resampling,
    ScaledByTime,
    SqueezeExcitation,
    TimeConditioned,
    TokenMixer,
)

Example = tuple[nn.Module, tuple[Tensor, ...]]
"""A block with its arguments."""


def _images(channels: int = 16) -> Tensor:
    return torch.randn(2, channels, 4, 4, requires_grad=True)


EXAMPLES: dict[str, Callable[[], Example]] = {
    "basic": lambda: (Basic(), (_images(),)),
    "basic-stride": lambda: (Basic(stride=2), (_images(),)),
    "bottleneck": lambda: (Bottleneck(), (_images(32),)),
    "resnext": lambda: (Bottleneck(groups=4), (_images(32),)),
    "mobilenet": lambda: (InvertedResidual(8), (_images(8),)),
    "efficientnet": lambda: (InvertedResidual(8, gate=SqueezeExcitation(32, 4)), (_images(8),)),
    "convnext": lambda: (Next(), (_images(),)),
    "unet": lambda: (TimeConditioned(), (_images(), torch.randn(2, 8, requires_grad=True))),
    "attention": lambda: (ConvAttention(), (_images(),)),
    "attention-1d": lambda: (ConvAttention(kernel=nn.Conv1d), (torch.randn(2, 16, 6, requires_grad=True),)),
    "fused-attention": lambda: (FusedConvAttention(), (_images(),)),
    "resampling": lambda: (Resampling(), (_images(8),)),
    "gated": lambda: (GatedDepthwise(), (_images(),)),
    "conformer": lambda: (Conformer(), (torch.randn(2, 6, 16, requires_grad=True),)),
    "scaled-by-time": lambda: (ScaledByTime(), (_images(), torch.randn(2, 8, requires_grad=True))),
    "linear-attention": lambda: (LinearAttention(), (_images(),)),
    "one-head": lambda: (OneHead(), (_images(),)),
    "depthwise-mlp": lambda: (DepthwiseMLP(), (torch.randn(2, 16, 16, requires_grad=True),)),
    "mixer": lambda: (TokenMixer(), (torch.randn(2, 8, 16, requires_grad=True),)),
    "conv1d": lambda: (Conv1dStack(), (torch.randn(16, 6, requires_grad=True),)),
}


def _make(name: str) -> Example:
    torch.manual_seed(0)
    block, args = EXAMPLES[name]()
    for parameter in block.parameters():
        if parameter.dim() == 1:
            nn.init.normal_(parameter, 0.5)
    return block, args


# ------------------------------------------------------------------------------------------------------------ planning


@dataclass(frozen=True, kw_only=True)
class Planned:
    """What is found for an example."""

    forward: int = 1
    """All-reduces in the forward."""
    backward: int = 1
    others: int = 0
    """One all-gather of running statistics, if there are any."""
    share: float = 0.95
    """Least share of parameters that is sharded."""


PLANNED = {
    "basic": Planned(others=1, share=0.99),
    "basic-stride": Planned(others=1),
    "bottleneck": Planned(others=1, share=0.8),
    "resnext": Planned(others=1, share=0.94),
    "mobilenet": Planned(others=1, share=0.98),
    "efficientnet": Planned(forward=2, backward=2, others=1, share=0.98),
    "convnext": Planned(share=0.71),
    "unet": Planned(backward=2),
    "attention": Planned(),
    "attention-1d": Planned(),
    "fused-attention": Planned(share=0.98),
    "resampling": Planned(others=1, share=0.99),
    "gated": Planned(share=0.98),
    "conformer": Planned(others=1),
    "scaled-by-time": Planned(backward=2),
    "linear-attention": Planned(share=0.99),
    "one-head": Planned(backward=2, share=0.47),
    "depthwise-mlp": Planned(share=0.99),
    "mixer": Planned(forward=2, backward=2, share=0.9),
    "conv1d": Planned(share=0.99),
}


@pytest.mark.parametrize("name", EXAMPLES)
def test_convolutions_are_sharded_by_channels(name: str) -> None:
    block, args = _make(name)
    plan, expected = plan_block(block, args, {}, size=2), PLANNED[name]
    counts = (plan.num_all_reduces_forward, plan.num_all_reduces_backward, plan.num_other_collectives_forward)
    assert counts == (expected.forward, expected.backward, expected.others), plan
    assert expected.share <= plan.sharded_share <= expected.share + 0.1, plan


def test_residuals_stay_on_shards_where_that_sends_less() -> None:
    """In ResNet-50's stages: whole ones would have the gradients of all their channels summed in every bottleneck."""
    transformers = pytest.importorskip("transformers")
    with torch.device("meta"):
        stages = transformers.ResNetModel(transformers.ResNetConfig()).encoder.stages
    x = torch.empty(4, 64, 56, 56, device="meta", requires_grad=True)
    plan = plan_block(stages[0], (x,), {}, size=2)
    for layer in range(3):
        assert plan.weight(f"layers.{layer}.layer.0.convolution.weight").role == ("row" if layer else "column")
    assert (plan.num_all_reduces_forward, plan.num_other_collectives_forward) == (3, 2)
    roles: dict[str, Role] = {"layers.0.shortcut.convolution.weight": "replicate"}
    for layer in range(3):
        for index, role in enumerate(("column", "row", "replicate")):
            roles[f"layers.{layer}.layer.{index}.convolution.weight"] = role  # type: ignore[assignment]
    whole = plan_block(
        stages[0], (x,), {}, size=2, by_hand={**roles, "layers.0.shortcut.convolution.weight": "replicate"}
    )
    assert whole.sharded_share > 0.5
    assert plan.communicated_bytes < whole.communicated_bytes


def _roles(plan: BlockTensorPlan) -> dict[str, tuple[str, int | None]]:
    return {weight.fqn: (weight.role, weight.shard_dim) for weight in plan.weights}


def test_the_channels_of_a_chain_are_sharded_from_column_to_row() -> None:
    block, args = _make("efficientnet")
    roles = _roles(plan_block(block, args, {}, size=4))
    assert roles["layers.0.weight"] == ("column", 0)
    assert roles["layers.1.weight"] == roles["layers.1.bias"] == ("column", 0)
    assert roles["layers.3.weight"] == ("column", 0)
    assert roles["layers.6.reduce.weight"] == ("row", 1)
    assert roles["layers.6.reduce.bias"] == ("replicate", None)
    assert roles["layers.6.expand.weight"] == roles["layers.6.expand.bias"] == ("column", 0)
    assert roles["layers.7.weight"] == ("row", 1)


def test_transposed_convolutions_have_their_channels_the_other_way_round() -> None:
    block, args = _make("resampling")
    roles = _roles(plan_block(block, args, {}, size=2))
    assert roles["up.weight"] == ("column", 1)
    assert roles["grouped.weight"] == roles["reflect.weight"] == ("column", 0)
    assert roles["down.weight"] == ("row", 0)


def test_what_can_not_be_sharded_says_why() -> None:
    plan = plan_block(nn.Sequential(nn.Conv2d(4, 9, 1), nn.Conv2d(9, 4, 1)), (_images(4),), {}, size=2)
    assert plan.weight("0.weight").reason == "9 output features are not divisible by 2"
    grouped = nn.Sequential(nn.Conv2d(6, 6, 1), nn.Conv2d(6, 6, 1, groups=3))
    plan = plan_block(grouped, (_images(6),), {}, size=2, by_hand={"0.weight": "column"})
    assert plan.weight("1.weight").reason == "3 groups are not divisible by 2"
    block, args = _make("convnext")
    plan = plan_block(block, args, {}, size=2)
    assert plan.weight("depthwise.weight").reason == "its input channels are not sharded"


def test_roles_by_hand_hold() -> None:
    block, args = _make("bottleneck")
    by_hand = {"reduce.weight": "replicate", "conv.weight": "column", "expand.weight": "row"}
    plan = plan_block(block, args, {}, size=2, by_hand=by_hand)
    assert {fqn: plan.weight(fqn).role for fqn in by_hand} == by_hand
    assert plan.num_all_reduces_forward == 1
    block, args = _make("convnext")
    plan = plan_block(block, args, {}, size=2, by_hand={"depthwise.weight": "column"})
    assert plan.weight("depthwise.weight").shard_dim == 0
    plan = plan_block(block, args, {}, size=2, by_hand={"depthwise.weight": "row"})
    assert plan.weight("depthwise.weight").reason == "its groups can't be sharded on their input channels"


# -------------------------------------------------------------------------------------------------------------- values
