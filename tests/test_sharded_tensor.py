"""Blocks on plain local tensors: DTensor takes no part, replicated operands get whole gradients, misuse raises."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_3d.errors import PlanError
from lightning_3d.tensor import apply_block, plan_block, verify_block
from lightning_3d.tensor.sharded_tensor import ShardedTensor
from tests.workers import WorkerPools


class DTensorOps(TorchDispatchMode):
    """Collects the ops that DTensor dispatches."""

    def __init__(self) -> None:
        super().__init__()
        self.ops: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            self.ops.append(str(func))
        return func(*args, **(kwargs or {}))


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
        angles = torch.arange(x.shape[-2])[:, None] / 10 ** torch.arange(x.shape[-1])
        first, second = x[..., : x.shape[-1] // 2], x[..., x.shape[-1] // 2 :]
        return x * angles.cos() + torch.cat((-second, first), dim=-1) * angles.sin()

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        h = self.norm1(x)
        q, k, v = (p(h).view(batch, length, self.num_heads, -1).transpose(1, 2) for p in (self.q, self.k, self.v))
        scores = self._rotate(q) @ self._rotate(k).transpose(-2, -1) * self.temperature
        mask = torch.ones(length, length, dtype=torch.bool).triu(1)
        y = scores.masked_fill(mask, float("-inf")).softmax(-1) @ v
        x = x + self.out(y.transpose(1, 2).contiguous().view(batch, length, -1))
        h = self.norm2(x)
        gate = F.silu(self.gate(h), inplace=True)
        gate *= self.up(h)
        gate[..., :] += 1
        return x + self.down(gate)


def _gradients(block: nn.Module, x: Tensor) -> dict[str, Tensor]:
    x = x.clone().requires_grad_()
    output = block(x)
    output.sin().sum().backward()
    assert x.grad is not None
    found = {"output": output.detach(), "x": x.grad}
    for fqn, parameter in block.named_parameters():
        assert parameter.grad is not None, fqn
        found[fqn] = parameter.grad.full_tensor() if isinstance(parameter.grad, DTensor) else parameter.grad
    return found


def _local() -> tuple[float, list[str], list[str]]:
    torch.manual_seed(0)
    block, x = Rotary(), torch.randn(2, 8, 32)
    dense = copy.deepcopy(block)
    plan = plan_block(block, (x,), {}, size=2)
    apply_block(block, plan, init_device_mesh("cpu", (2,), mesh_dim_names=("tp",)))
    found, expected = _gradients(block, x), _gradients(dense, x)
    difference = max(float((found[name] - value).abs().max()) for name, value in expected.items())
    with DTensorOps() as watch:
        block(x)
    return difference, watch.ops, [weight.fqn for weight in plan.weights if weight.shard_dim is not None]


def test_a_block_runs_on_local_tensors(workers: WorkerPools) -> None:
    for difference, ops, sharded in workers(2).run(_local):
        assert sharded == [
            *("q.weight", "k.weight", "v.weight", "out.weight"),
            *("gate.weight", "gate.bias", "up.weight", "up.bias", "down.weight"),
        ]
        assert difference < 1e-4
        assert ops == []


class Doubled(torch.autograd.Function):
    """2 x, or the sum of it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, summed: bool) -> Tensor:
        ctx.shape = x.shape
        return (2 * x).sum() if summed else 2 * x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return 2 * gradient.expand(ctx.shape), None


class Doubling(nn.Module):
    def __init__(self, summed: bool) -> None:
        super().__init__()
        self.up, self.down, self.summed = nn.Linear(32, 64), nn.Linear(64, 32), summed

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.up(x)
        doubled = Doubled.apply(hidden, self.summed)
        return self.down(hidden) * doubled if self.summed else self.down(doubled)


class Averaged(torch.autograd.Function):
    """Divides by a number of features, in the forward or in the backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, backwards: bool) -> Tensor:
        ctx.num_features = x.shape[-1] if backwards else 1
        return x.clone() if backwards else x / x.shape[-1]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient / ctx.num_features, None


class Averaging(nn.Module):
    def __init__(self, backwards: bool) -> None:
        super().__init__()
        self.up, self.down, self.backwards = nn.Linear(32, 64), nn.Linear(64, 32), backwards

    def forward(self, x: Tensor) -> Tensor:
        return self.down(Averaged.apply(self.up(x), self.backwards))


@pytest.mark.parametrize("backwards", [False, True])
def test_custom_functions_of_the_number_of_features_get_whole_tensors(backwards: bool) -> None:
    plan = plan_block(Averaging(backwards), (torch.randn(2, 8, 32),), {}, size=2)
    assert not plan.is_sharded
    assert "Averaged" in str(plan.weight("up.weight").reason)


class Hooked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.up(x)
        hidden.register_hook(lambda gradient: 2 * gradient)
        return self.down(hidden)


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


def _refused() -> tuple[float, str]:
    torch.manual_seed(0)
    mesh, x = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",)), torch.randn(2, 8, 32)
    hooked = Hooked()
    dense, plan = copy.deepcopy(hooked), plan_block(hooked, (x,), {}, size=2)
    assert "register_hook changes" in str(plan.weight("up.weight").reason)
    apply_block(hooked, plan, mesh)
    found, expected = _gradients(hooked, x), _gradients(dense, x)
    difference = max(float((found[name] - value).abs().max()) for name, value in expected.items())
    watched, seen = Kept(), []
    apply_block(watched, plan_block(watched, (x,), {}, size=2), mesh)
    watched.up.register_forward_hook(lambda module, args, output: seen.append(output))
    watched(x)
    assert isinstance(seen[0], ShardedTensor)
    with pytest.raises(PlanError) as error:
        seen[0] + 1
    return difference, str(error.value)


def test_what_would_lose_gradients_is_whole_or_raises(workers: WorkerPools) -> None:
    difference, watched = workers(2).run(_refused)[0]
    assert difference < 1e-5
    assert "after the block's forward (aten.add.Tensor)" in watched


def _kept() -> list[float]:
    torch.manual_seed(0)
    mesh, x = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",)), torch.randn(2, 8, 32)
    dense = Kept()
    kept = copy.deepcopy(dense)
    apply_block(kept, plan_block(kept, (x,), {}, size=2), mesh)
    seen = []
    for block in (dense, kept):
        leaf = x.clone().requires_grad_()
        output = block(leaf)
        assert block.hidden is not None
        (output.sum() + block.hidden.square().mean() + block.listed[0]["hidden"].mean()).backward()
        seen.append((block.hidden.detach() + 0, leaf.grad, block.state_dict()["mean"] + 0))
    return [float((dense - own).abs().max()) for dense, own in zip(*seen, strict=True)]


def test_what_a_block_keeps_is_whole_to_readers(workers: WorkerPools) -> None:
    for differences in workers(2).run(_kept):
        assert max(differences) < 1e-6


def _proved() -> list[tuple[bool, bool]]:
    torch.manual_seed(0)
    mesh, x, found = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",)), torch.randn(2, 8, 32), []
    for block in (Doubling(summed=False), Doubling(summed=True)):
        plan = plan_block(block, (x,), {}, size=2)
        found.append((plan.is_sharded, verify_block(block, plan, (x,), {}, mesh).passed))
    return found


def test_custom_functions_on_shards_are_proved(workers: WorkerPools) -> None:
    assert workers(2).run(_proved)[0] == [(True, True), (True, True)]


class Shifted(nn.Module):
    """Two parameters whose gradients are one tensor to autograd."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 32)
        self.first, self.second = (nn.Parameter(torch.zeros(2, 8, 32)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x)) + self.first + self.second


def _clipped() -> float:
    torch.manual_seed(0)
    block, x = Shifted(), torch.randn(2, 8, 32)
    dense = copy.deepcopy(block)
    apply_block(block, plan_block(block, (x,), {}, size=2), init_device_mesh("cpu", (2,), mesh_dim_names=("tp",)))
    for module in (block, dense):
        module(x).sin().sum().backward()
        for parameter in module.parameters():
            parameter.grad *= 0.5
    pairs = zip(block.parameters(), dense.parameters(), strict=True)
    return max(float((sharded.grad.full_tensor() - full.grad).abs().max()) for sharded, full in pairs)


def test_gradients_do_not_share_memory(workers: WorkerPools) -> None:
    assert max(workers(2).run(_clipped)) < 1e-5
