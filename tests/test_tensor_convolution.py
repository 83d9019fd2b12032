"""Convolution stacks are sharded by channels: the plans that are found, and the values of one process."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from lightning_3d.checkpoint import model_state, optimizer_state
from lightning_3d.checkpoint.box import full_value
from lightning_3d.tensor import BlockTensorPlan, apply_block, plan_block
from lightning_3d.tensor.placement import marked
from lightning_3d.tensor.plan.block_plan import Role
from tests.architectures import InvertedResidual
from tests.checkpoints import restore_folder, save_sharded
from tests.collectives import Collectives, Sent, by_kind, planned
from tests.models import ADAM_EPS
from tests.workers import WorkerPools

Example = tuple[nn.Module, tuple[Tensor, ...]]
"""A block with its arguments."""


class Basic(nn.Module):
    """ResNet-18's block; with a stride its shortcut is a convolution."""

    def __init__(self, channels: int = 16, stride: int = 1) -> None:
        super().__init__()
        out = channels * stride
        self.conv1 = nn.Conv2d(channels, out, 3, stride, padding=1, bias=False)
        self.conv2 = nn.Conv2d(out, out, 3, padding=1, bias=False)
        self.norm1, self.norm2 = nn.BatchNorm2d(out), nn.BatchNorm2d(out)
        self.shortcut: nn.Module = nn.Identity()
        if stride > 1:
            self.shortcut = nn.Sequential(nn.Conv2d(channels, out, 1, stride, bias=False), nn.BatchNorm2d(out))

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norm1(self.conv1(x)), inplace=True)
        y = self.norm2(self.conv2(y))
        y += self.shortcut(x)
        return F.relu(y, inplace=True)


class Bottleneck(nn.Module):
    """ResNet-50's block, ResNeXt's with groups."""

    def __init__(self, channels: int = 32, width: int = 16, groups: int = 1) -> None:
        super().__init__()
        self.reduce = nn.Conv2d(channels, width, 1)
        self.conv = nn.Conv2d(width, width, 3, padding=1, groups=groups)
        self.expand = nn.Conv2d(width, channels, 1)
        self.norms = nn.ModuleList(nn.BatchNorm2d(c) for c in (width, width, channels))

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norms[0](self.reduce(x)))
        y = F.relu(self.norms[1](self.conv(y)))
        return F.relu(x + self.norms[2](self.expand(y)))


class SqueezeExcitation(nn.Module):
    """Scales channels by what their means say."""

    def __init__(self, channels: int, width: int) -> None:
        super().__init__()
        self.reduce, self.expand = nn.Conv2d(channels, width, 1), nn.Conv2d(width, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        scale = F.silu(self.reduce(F.adaptive_avg_pool2d(x, 1)))
        return x * self.expand(scale).sigmoid()


class Next(nn.Module):
    """ConvNeXt's block, with 1x1 convolutions."""

    def __init__(self, channels: int = 16) -> None:
        super().__init__()
        self.depthwise = nn.Conv2d(channels, channels, 7, padding=3, groups=channels)
        self.norm = nn.GroupNorm(1, channels)
        self.expand, self.reduce = nn.Conv2d(channels, 4 * channels, 1), nn.Conv2d(4 * channels, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.reduce(F.gelu(self.expand(self.norm(self.depthwise(x)))))


class TimeConditioned(nn.Module):
    """The block of a diffusion U-Net: group norms, dropout, and an embedding of the time that is added to channels."""

    def __init__(self, channels: int = 16, out: int = 32) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.GroupNorm(4, channels), nn.GroupNorm(4, out)
        self.conv1, self.conv2 = nn.Conv2d(channels, out, 3, padding=1), nn.Conv2d(out, out, 3, padding=1)
        self.time = nn.Linear(8, out)
        self.dropout = nn.Dropout2d(0.0)
        self.shortcut = nn.Conv2d(channels, out, 1)

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        y = self.conv1(F.silu(self.norm1(x))) + self.time(F.silu(time))[:, :, None, None]
        return self.shortcut(x) + self.conv2(self.dropout(F.silu(self.norm2(y))))


class ConvAttention(nn.Module):
    """Attention over pixels with 1x1 convolutions."""

    def __init__(self, channels: int = 16, num_heads: int = 4, kernel: type[nn.Module] = nn.Conv2d) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.norm = nn.GroupNorm(4, channels)
        self.q, self.k, self.v, self.out = (kernel(channels, channels, 1) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        q, k, v = (p(y).view(x.shape[0], self.num_heads, -1, x.shape[2:].numel()) for p in (self.q, self.k, self.v))
        attended = F.scaled_dot_product_attention(*(t.transpose(-2, -1) for t in (q, k, v)))
        return x + self.out(attended.transpose(-2, -1).reshape(x.shape))


class FusedConvAttention(nn.Module):
    """The same with one convolution for query, key and value."""

    def __init__(self, channels: int = 16, num_heads: int = 4) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.qkv, self.out = nn.Conv2d(channels, 3 * channels, 1), nn.Conv2d(channels, channels, 1)

    def separate(self, qkv: Tensor) -> tuple[Tensor, ...]:
        return tuple(t.reshape(len(t), self.num_heads, -1, t.shape[2:].numel()) for t in qkv.chunk(3, dim=1))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.transpose(-2, -1) for t in self.separate(self.qkv(x)))
        return x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(-2, -1).reshape(x.shape))


class FusedByView(FusedConvAttention):
    """The query, key and value by a view."""

    def separate(self, qkv: Tensor) -> tuple[Tensor, ...]:
        return qkv.flatten(2).view(len(qkv), 3, self.num_heads, -1, qkv.shape[2:].numel()).unbind(1)


class Resampling(nn.Module):
    """Transposed convolutions, pooling, resizing, padding and norms, all on own channels."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.ConvTranspose2d(8, 32, 2, stride=2)
        self.grouped = nn.ConvTranspose2d(32, 16, 3, padding=1, groups=4)
        self.norm = nn.InstanceNorm2d(16, affine=True, track_running_stats=True)
        self.slopes = nn.PReLU(16)
        self.reflect = nn.Conv2d(16, 16, 3, padding=1, padding_mode="reflect", groups=16, bias=False)
        self.down = nn.ConvTranspose2d(4, 8, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.slopes(self.norm(self.grouped(self.up(x))))
        y = F.max_pool2d(self.reflect(y), 2) + F.adaptive_avg_pool2d(y, 4) + F.avg_pool2d(y, 2)
        y = F.interpolate(F.pad(y, (1, 1)), size=(4, 4), mode="bilinear")
        return x + self.down(F.avg_pool2d(F.pixel_shuffle(y, 2), 2))


class Conv1dStack(nn.Module):
    """Convolutions along time with a gate, over channels of samples without a batch."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.value = nn.Conv1d(16, 32, 3, padding=1), nn.Conv1d(16, 32, 3, padding=1)
        self.mix = nn.Conv1d(32, 16, 1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mix(self.gate(x).sigmoid() * F.max_pool1d(self.value(x), 3, 1, 1))


class Conv3dStack(nn.Module):
    """Volumes, with a norm that groups channels in a way that the ranks can't, and a stride."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Conv3d(4, 12, 3, 2), nn.GroupNorm(3, 12), nn.Conv3d(12, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.relu(self.norm(self.up(x))))


class GatedDepthwise(nn.Module):
    """Restormer's and NAFNet's: two parts of one convolution go through a depthwise one."""

    def __init__(self, channels: int = 16) -> None:
        super().__init__()
        width = 2 * channels
        self.project = nn.Conv2d(channels, 2 * width, 1)
        self.depthwise = nn.Conv2d(2 * width, 2 * width, 3, padding=1, groups=2 * width)
        self.out = nn.Conv2d(width, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        values, gates = self.depthwise(self.project(x)).chunk(2, dim=1)
        return x + self.out(F.gelu(values) * gates)


class Conformer(nn.Module):
    """The convolution module of a conformer."""

    def __init__(self, channels: int = 16) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv1d(channels, 2 * channels, 1),
            nn.GLU(dim=1),
            nn.Conv1d(channels, channels, 3, padding=1, groups=channels),
            nn.BatchNorm1d(channels),
            nn.SiLU(),
            nn.Conv1d(channels, channels, 1),
        )

    def forward(self, x: Tensor) -> Tensor:
        return x + self.layers(x.transpose(1, 2)).transpose(1, 2)


class ScaledByTime(nn.Module):
    """A block of a diffusion U-Net whose embedding of the time scales and shifts channels."""

    def __init__(self, channels: int = 16) -> None:
        super().__init__()
        self.conv1, self.conv2 = (nn.Conv2d(channels, channels, 3, padding=1) for _ in range(2))
        self.norm, self.time = nn.GroupNorm(4, channels), nn.Linear(8, 2 * channels)

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        scale, shift = self.time(time)[:, :, None, None].chunk(2, dim=1)
        return x + self.conv2(F.silu(self.norm(self.conv1(x)) * (1 + scale) + shift))


class LinearAttention(nn.Module):
    """Attention over channels, by einsum, from one fused convolution."""

    def __init__(self, channels: int = 16, num_heads: int = 4) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.qkv, self.out = nn.Conv2d(channels, 6 * channels, 1, bias=False), nn.Conv2d(2 * channels, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.reshape(len(t), self.num_heads, -1, t.shape[2:].numel()) for t in self.qkv(x).chunk(3, dim=1))
        context = torch.einsum("bhdn,bhen->bhde", k.softmax(-1), v)
        return x + self.out(torch.einsum("bhde,bhdn->bhen", context, q.softmax(-2)).reshape(len(x), -1, *x.shape[2:]))


class OneHead(nn.Module):
    """An autoencoder's attention: as it has one head, only values are sharded."""

    def __init__(self, channels: int = 16) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Conv2d(channels, channels, 1) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (projection(x).flatten(2) for projection in (self.q, self.k, self.v))
        scores = torch.bmm(q.permute(0, 2, 1), k).softmax(2)
        return x + self.out(torch.bmm(v, scores.permute(0, 2, 1)).view(x.shape))


class DepthwiseMLP(nn.Module):
    """SegFormer's MLP: linear layers, and a depthwise convolution between them."""

    def __init__(self, channels: int = 16) -> None:
        super().__init__()
        width = 4 * channels
        self.up, self.down = nn.Linear(channels, width), nn.Linear(width, channels)
        self.depthwise = nn.Conv2d(width, width, 3, padding=1, groups=width)

    def forward(self, x: Tensor) -> Tensor:
        y = self.up(x).transpose(1, 2)
        y = self.depthwise(y.view(*y.shape[:2], 4, -1)).flatten(2).transpose(1, 2)
        return x + self.down(F.gelu(y))


class TokenMixer(nn.Module):
    """Convolutions whose channels are the tokens, then one along them."""

    def __init__(self, length: int = 8, channels: int = 16) -> None:
        super().__init__()
        self.mix = nn.Sequential(nn.Conv1d(length, 4 * length, 1), nn.GELU(), nn.Conv1d(4 * length, length, 1))
        self.along = nn.Conv1d(channels, channels, 3, padding=1, groups=channels)
        self.up, self.down = nn.Linear(channels, 32), nn.Linear(32, channels)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.mix(x)
        x = x + self.along(x.transpose(1, 2)).transpose(1, 2)
        return x + self.down(F.relu(self.up(x)))


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
    "fused-by-view": lambda: (FusedByView(), (_images(),)),
    "resampling": lambda: (Resampling(), (_images(8),)),
    "gated": lambda: (GatedDepthwise(), (_images(),)),
    "conformer": lambda: (Conformer(), (torch.randn(2, 6, 16, requires_grad=True),)),
    "scaled-by-time": lambda: (ScaledByTime(), (_images(), torch.randn(2, 8, requires_grad=True))),
    "linear-attention": lambda: (LinearAttention(), (_images(),)),
    "one-head": lambda: (OneHead(), (_images(),)),
    "depthwise-mlp": lambda: (DepthwiseMLP(), (torch.randn(2, 16, 16, requires_grad=True),)),
    "mixer": lambda: (TokenMixer(), (torch.randn(2, 8, 16, requires_grad=True),)),
    "conv1d": lambda: (Conv1dStack(), (torch.randn(16, 6, requires_grad=True),)),
    "conv3d": lambda: (Conv3dStack(), (torch.randn(2, 4, 6, 6, 6, requires_grad=True),)),
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
    "fused-by-view": Planned(share=0.98),
    "resampling": Planned(others=1, share=0.99),
    "gated": Planned(share=0.98),
    "conformer": Planned(others=1),
    "scaled-by-time": Planned(backward=2),
    "linear-attention": Planned(share=0.99),
    "one-head": Planned(backward=2, share=0.47),
    "depthwise-mlp": Planned(share=0.99),
    "mixer": Planned(forward=2, backward=2, share=0.9),
    "conv1d": Planned(share=0.99),
    "conv3d": Planned(forward=0, backward=0, share=0.0),
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


def _step(block: nn.Module, args: Sequence[Tensor]) -> tuple[dict[str, Tensor], Sent, Sent]:
    """Output, gradients and buffers by name, collectives of the forward, of the backward."""
    args = [arg.detach().clone().requires_grad_() for arg in args]
    with Collectives() as forward:
        output = block(*args)
    with Collectives() as backward:
        (output.sin() * torch.arange(1, output.numel() + 1).view_as(output) / output.numel()).sum().backward()
    values = {"output": output.detach(), **dict(block.named_buffers())}
    values |= {f"argument {index}": arg.grad for index, arg in enumerate(args) if arg.grad is not None}
    parts = marked(block)
    for fqn, parameter in block.named_parameters():
        gradient = parameter.grad
        if isinstance(gradient, DTensor):
            gradient = gradient.full_tensor()
            gradient = parts[fqn].ungrouped(gradient) if fqn in parts else gradient
        assert gradient is not None
        values[f"gradient of {fqn}"] = gradient
        parameter.grad = None
    return values, forward.sent, backward.sent


def _is_like(dense: nn.Module, sharded: nn.Module, args: Sequence[Tensor]) -> tuple[Sent, Sent]:
    expected, _, _ = _step(dense, args)
    values, forward, backward = _step(sharded, args)
    assert values.keys() == expected.keys()
    for key, value in values.items():
        torch.testing.assert_close(
            value, expected[key], rtol=1e-9, atol=1e-9, msg=lambda text, key=key: f"{key}: {text}"
        )
    return forward, backward


def _parity(
    name: str, by_hand: Mapping[str, Role], sequence_parallel: bool = False
) -> tuple[BlockTensorPlan, Counter[str], Counter[str]]:
    block, args = _make(name)
    block.double()  # so that the tolerance can be narrow: batch normalisation of few pixels magnifies rounding
    args = tuple(arg.detach().double().requires_grad_() for arg in args)
    dense = copy.deepcopy(block)
    size = dist.get_world_size()
    plan = plan_block(block, args, {}, size=size, by_hand=by_hand, sequence_parallel=sequence_parallel)
    assert plan.is_sequence_parallel == sequence_parallel
    apply_block(block, plan, init_device_mesh("cpu", (size,), mesh_dim_names=("tp",)))
    for fqn, parameter in block.named_parameters():
        assert isinstance(parameter, DTensor)
        assert parameter.to_local().numel() * (1 if plan.weight(fqn).shard_dim is None else size) == parameter.numel()
    _is_like(dense, block, args)
    forward, backward = _is_like(dense, block, [arg * 2 for arg in args])
    assert forward == planned(plan, is_backward=False)
    assert backward == planned(plan, is_backward=True)
    dense.eval(), block.eval()
    evaluated, _ = _is_like(dense, block, args)
    if not by_hand and not sequence_parallel:  # statistics stay as they are
        assert by_kind(evaluated) == {"all-reduce": plan.num_all_reduces_forward}
    return plan, by_kind(forward), by_kind(backward)


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.matrix)])
@pytest.mark.parametrize("name", [name for name in EXAMPLES if name != "conv3d"])
def test_values_are_those_of_one_process(workers: WorkerPools, name: str, size: int) -> None:
    for plan, forward, backward in workers(size).run(_parity, name, {}):
        assert plan.is_sharded
        assert forward["all-reduce"] == plan.num_all_reduces_forward
        assert backward == {"all-reduce": plan.num_all_reduces_backward}


@pytest.mark.parametrize(
    ("name", "by_hand"),
    [
        ("bottleneck", {"reduce.weight": "replicate", "conv.weight": "column", "expand.weight": "row"}),
        ("bottleneck", {"reduce.weight": "row", "conv.weight": "column", "expand.weight": "column"}),
        ("basic", {"norm1.weight": "replicate"}),
        ("convnext", {"depthwise.weight": "column"}),
        ("resampling", {"grouped.weight": "replicate", "down.weight": "column"}),
    ],
)
def test_roles_by_hand_give_the_same_values(workers: WorkerPools, name: str, by_hand: dict[str, Role]) -> None:
    for plan, _, _ in workers(2).run(_parity, name, by_hand):
        assert {fqn: plan.weight(fqn).role for fqn in by_hand} == by_hand


@pytest.mark.parametrize("name", ["conformer", "depthwise-mlp", "mixer"])
def test_slices_of_the_sequence_are_whole_to_convolutions(workers: WorkerPools, name: str) -> None:
    for plan, _, _ in workers(2).run(_parity, name, {}, True):
        assert plan.is_sharded


def _autocast() -> tuple[float, float]:
    block, args = _make("unet")
    dense = copy.deepcopy(block)
    apply_block(block, plan_block(block, args, {}, size=2), init_device_mesh("cpu", (2,), mesh_dim_names=("tp",)))
    with torch.autocast("cpu", torch.bfloat16):
        output, expected = block(*args), dense(*args)
    assert output.dtype == expected.dtype == torch.bfloat16
    output.float().square().mean().backward()
    expected.float().square().mean().backward()
    gradient, expected_gradient = block.conv1.weight.grad, dense.conv1.weight.grad
    assert isinstance(gradient, DTensor)
    return _distance(output, expected), _distance(gradient.full_tensor(), expected_gradient)


def _distance(value: Tensor, expected: Tensor) -> float:
    return float((value - expected).abs().max() / expected.abs().max())


def test_autocast_gives_the_same_dtypes(workers: WorkerPools) -> None:
    for output, gradient in workers(2).run(_autocast):
        assert 0 < output < 0.03
        assert 0 < gradient < 0.03


class Dropping(nn.Module):
    """Drops channels of a sharded activation, and returns it."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Conv2d(4, 64, 1), nn.Conv2d(64, 4, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        dropped = F.dropout2d(self.up(x), 0.5, self.training)
        return dropped, self.down(dropped)


def _dropped() -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    block, x = Dropping(), _images(4)
    nn.init.ones_(block.up.bias)
    plan = plan_block(block, (x,), {}, size=2, by_hand={"up.weight": "column", "down.weight": "row"})
    apply_block(block, plan, init_device_mesh("cpu", (2,), mesh_dim_names=("tp",)))
    dropped, _ = block(x)
    return dropped.detach(), torch.rand(4)


def test_every_rank_drops_channels_of_its_own(workers: WorkerPools) -> None:
    (dropped, after), (dropped_1, after_1) = workers(2).run(_dropped)
    assert torch.equal(dropped, dropped_1)
    assert torch.equal(after, after_1)  # the ranks' generators stay in step
    kept = dropped.flatten(2).abs().sum(-1) > 0  # [sample, channel]
    assert 0.3 < kept.double().mean() < 0.7
    assert torch.equal(kept, (dropped != 0).flatten(2).all(-1))
    assert not torch.equal(*kept.chunk(2, 1))


class Recomputed(nn.Module):
    """A block under activation checkpointing, whose recomputed forward is left early."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = checkpoint(self.block, x, use_reentrant=False)
        return output


def _recomputed() -> None:
    block, (x,) = _make("bottleneck")
    dense = copy.deepcopy(block)
    apply_block(block, plan_block(block, (x,), {}, size=2), init_device_mesh("cpu", (2,), mesh_dim_names=("tp",)))
    _is_like(Recomputed(dense.double()), Recomputed(block.double()), [x.double()])


def test_recomputation_updates_the_statistics_alike(workers: WorkerPools) -> None:
    workers(2).run(_recomputed)


class Net(nn.Module):
    """Blocks with running statistics in their middle."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Basic(), InvertedResidual(16)])

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def _net(tp: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    net = Net().double()
    if tp > 1:
        root = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_shard", "tp"))
        for block in net.blocks:
            apply_block(block, plan_block(block, (_images(),), {}, size=tp), root["tp"])
            fully_shard(block, mesh=root["dp_shard"])
    return net, torch.optim.AdamW(net.parameters(), lr=1e-2, eps=ADAM_EPS)


def _train(net: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    x = torch.linspace(-2, 2, 2 * 16 * 4 * 4, dtype=torch.double).sin().view(2, 16, 4, 4)
    for _ in range(2):
        optimizer.zero_grad()
        net(x).square().mean().backward()
        optimizer.step()


def _saved_and_loaded(writer: int, reader: int) -> float:
    """Greatest difference from one process that trains on."""
    net, optimizer = _net(writer)
    dense, dense_optimizer = _net(1)
    _train(net, optimizer)
    save_sharded(
        Path("folder").absolute(),
        {"state_dict": model_state(net), "optimizer_states": [optimizer_state(net, optimizer)]},
        None,
    )
    other, other_optimizer = _net(reader)
    nn.init.zeros_(other.blocks[1].get_buffer("layers.1.running_mean"))
    restore_folder(Path("folder").absolute(), other, [other_optimizer])
    for trained in ((dense, dense_optimizer), (dense, dense_optimizer), (other, other_optimizer)):
        _train(*trained)
    values = model_state(other)
    return max(float((full_value(values[fqn]) - value).abs().max()) for fqn, value in dense.state_dict().items())


@pytest.mark.parametrize(("writer", "reader"), [(2, 1), (1, 2), (2, 2)])
def test_files_hold_whole_kernels_and_statistics(workers: WorkerPools, writer: int, reader: int) -> None:
    for difference in workers(4).run(_saved_and_loaded, writer, reader):
        assert difference < 1e-9
