"""Proofs of tensor-parallel plans, and plans that do not fit; that blocks run as one process would is in tests/law."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

from lightning_3d.errors import PlanError
from lightning_3d.tensor import (
    Verification,
    apply_block,
    block_signature,
    plan_block,
    replicated_plan,
    verify_block,
)
from lightning_3d.tensor.placement import marked
from tests.collectives import Collectives
from tests.law.models.spellings import CustomScale
from tests.models import Block
from tests.test_tensor_plan import Example, gpt, tokens
from tests.workers import WorkerPools


def _mesh(size: int) -> DeviceMesh:
    return init_device_mesh("cpu", (size,), mesh_dim_names=("tp",))


def _loss(output: Any) -> Tensor:
    """A function of everything that a block returns, with a gradient that differs everywhere."""
    leaves = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor)]
    assert not any(isinstance(leaf, DTensor) for leaf in leaves), "the caller sees a DTensor"
    return sum((leaf.sin() * (index + 1)).sum() for index, leaf in enumerate(leaves))  # type: ignore[return-value]


def _run(block: nn.Module, example: Example) -> tuple[Tensor, dict[str, Tensor], Collectives, Collectives]:
    """Loss, gradients by name, collectives of the forward, of the backward."""
    _, args, kwargs = example
    tensors = [
        leaf.detach().clone().requires_grad_(leaf.is_floating_point()) for leaf in args if isinstance(leaf, Tensor)
    ]
    args = (*tensors, *args[len(tensors) :])  # tensors come first
    with Collectives() as forward:
        loss = _loss(block(*args, **kwargs))
    with Collectives() as backward:
        loss.backward()
    gradients = {f"argument {index}": arg.grad for index, arg in enumerate(tensors) if arg.grad is not None}
    grouped = marked(block)
    for fqn, parameter in block.named_parameters():
        gradient = parameter.grad
        if isinstance(gradient, DTensor):
            assert isinstance(parameter, DTensor)
            assert gradient.placements == parameter.placements
            gradient = gradient.full_tensor()
            gradient = grouped[fqn].ungrouped(gradient) if fqn in grouped else gradient
        if gradient is not None:
            gradients[fqn] = gradient
    return loss.detach(), gradients, forward, backward


# ------------------------------------------------------------------------------------------------------------- training


# ----------------------------------------------------------------------------------------- checkpoints of fused weights


# -------------------------------------------------------------------------------------------------------------- dropout


# --------------------------------------------------------------------------------------------------------------- proof


class Peeking(nn.Module):
    """Computes something else when its activation is sharded."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.up(x)
        return self.down(hidden) * (1.0 if type(hidden) is Tensor else 2.0)


class Scaling(nn.Module):
    """A custom autograd function on a sharded activation and a plain parameter, both saved for its backward."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 32)
        self.gain = nn.Parameter(torch.rand(64) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(CustomScale.apply(self.up(x), self.gain))


def _verified(block: nn.Module, args: tuple[Any, ...]) -> Verification:
    torch.manual_seed(0)
    plan = plan_block(block, args, {}, size=2)
    assert plan.is_sharded
    parameters, state = dict(block.named_parameters()), torch.random.get_rng_state()
    values = {fqn: value.clone() for fqn, value in block.state_dict().items()}
    verification = verify_block(block, plan, args, {}, _mesh(2))
    assert torch.equal(torch.random.get_rng_state(), state)
    assert block.training
    assert all(parameters[fqn] is parameter for fqn, parameter in block.named_parameters())
    assert all(parameter.grad is None for parameter in block.parameters())
    assert all(torch.equal(values[fqn], value) for fqn, value in block.state_dict().items())
    assert "forward" not in vars(block)
    return verification


def _proofs() -> list[Verification]:
    torch.manual_seed(0)
    x = tokens()
    dropping = nn.Sequential(nn.BatchNorm1d(16), nn.Linear(32, 64), nn.Dropout(0.5), nn.Linear(64, 32))
    return [
        _verified(Block(32, 4), (x,)),
        _verified(Block(32, 4), (x.to("meta"),)),
        _verified(Block(32, 4).bfloat16(), (x.bfloat16(),)),
        _verified(dropping, (x,)),
        _verified(Scaling(), (x,)),
    ]


def test_right_plans_are_proved(workers: WorkerPools) -> None:
    for verifications in workers(2).run(_proofs):
        assert all(verification.passed for verification in verifications), [str(v) for v in verifications]
        fp32, bf16 = verifications[0], verifications[2]
        assert 0 < fp32.output < 1e-6
        assert 0 < fp32.input_gradient < 1e-6
        assert fp32.tolerance < 1e-3 < bf16.output < bf16.tolerance


def _disproofs() -> list[Verification]:
    torch.manual_seed(0)
    return [_verified(Peeking(), (tokens(),))]


def test_wrong_plans_are_not_proved(workers: WorkerPools) -> None:
    ranks = workers(2).run(_disproofs)
    assert ranks[0] == ranks[1]
    (peeking,) = ranks[0]
    assert not peeking.passed
    assert peeking.output == pytest.approx(1.0)
    assert peeking.error is None
    assert str(peeking).startswith("not proved")


def test_like_blocks_share_a_proof() -> None:
    plan = plan_block(*gpt(), size=2)
    signature = block_signature(Block(32, 4), plan)
    assert hash(signature) == hash(block_signature(Block(32, 4), plan))
    assert signature == block_signature(Block(32, 4), plan)
    frozen = Block(32, 4).requires_grad_(False)
    whole = replicated_plan(Block(32, 4), size=2, reason="asked for")
    others = [block_signature(frozen, plan), block_signature(Block(64, 4), plan), block_signature(Block(32, 4), whole)]
    assert signature not in others


# -------------------------------------------------------------------------------------------------------------- misuse


def _misuse() -> list[str]:
    mesh, messages = _mesh(2), []
    block, (x,), _ = gpt()
    weight = block.get_parameter("mlp.0.weight")
    for plan, target, excluded in (
        (plan_block(block, (x,), {}, size=4), block, set()),
        (plan_block(block, (x,), {}, size=2), Block(64, 4), set()),
        (plan_block(block, (x,), {}, size=2), nn.Linear(32, 32), set()),
        (plan_block(block, (x,), {}, size=2), block, {weight}),
    ):
        with pytest.raises(PlanError) as error:
            apply_block(target, plan, mesh, excluded=excluded)
        messages.append(str(error.value))
    assert block.get_parameter("mlp.0.weight") is weight
    return messages


def test_plans_that_do_not_fit_are_refused(workers: WorkerPools) -> None:
    messages = workers(2).run(_misuse)[0]
    assert messages[0] == "a tensor-parallel plan for 4 ranks can't be applied to a tp axis of 2"
    assert "Block is not the block of this tensor-parallel plan" in messages[1]
    assert "Linear is not the block of this tensor-parallel plan" in messages[2]
    assert "mlp.0.weight is excluded from tensor parallel, but the plan shards it" in messages[3]
