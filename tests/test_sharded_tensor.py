"""Blocks on plain local tensors: DTensor takes no part, replicated operands get whole gradients, misuse raises."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from lightning_3d.errors import PlanError
from lightning_3d.tensor import apply_block, plan_block
from lightning_3d.tensor.sharded_tensor import ShardedTensor
from tests.law.models.spellings import Kept
from tests.workers import WorkerPools


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
