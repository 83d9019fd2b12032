"""Proofs of tensor-parallel plans, plans that do not fit, and what is read of blocks on shards.

That blocks run as one process would is in tests/law.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from lightning_3d.errors import PlanError
from lightning_3d.tensor import Verification, apply_block, block_signature, plan_block, replicated_plan, verify_block
from lightning_3d.tensor.sharded_tensor import ShardedTensor
from tests.law.models.experts import WIDTH, Modules, Stacked, by_mask
from tests.law.models.spellings import Doubling, Kept
from tests.models import Block
from tests.test_tensor_plan import gpt, tokens
from tests.workers import WorkerPools


def _mesh(size: int) -> DeviceMesh:
    return init_device_mesh("cpu", (size,), mesh_dim_names=("tp",))


class Peeking(nn.Module):
    """Computes something else when its activation is sharded."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.up(x)
        return self.down(hidden) * (1.0 if type(hidden) is Tensor else 2.0)


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
        _verified(Doubling(), (x,)),
        _verified(Peeking(), (x,)),
    ]


def test_right_plans_are_proved_and_wrong_ones_are_not(workers: WorkerPools) -> None:
    for *right, peeking in workers(2).run(_proofs):
        assert all(verification.passed for verification in right), [str(v) for v in right]
        fp32, bf16 = right[0], right[2]
        assert 0 < fp32.output < 1e-6
        assert 0 < fp32.input_gradient < 1e-6
        assert fp32.tolerance < 1e-3 < bf16.output < bf16.tolerance
        assert (peeking.passed, peeking.error, peeking.output) == (False, None, pytest.approx(1.0))
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


def _kept() -> tuple[list[float], str]:
    """Differences of what a block keeps, to readers outside of it; what a hook of a block is told that reads shards."""
    torch.manual_seed(0)
    x, dense = torch.randn(2, 8, 32), Kept()
    kept = copy.deepcopy(dense)
    apply_block(kept, plan_block(kept, (x,), {}, size=2), _mesh(2))
    found = []
    for block in (dense, kept):
        leaf = x.clone().requires_grad_()
        output = block(leaf)
        assert block.hidden is not None
        (output.sum() + block.hidden.square().mean() + block.listed[0]["hidden"].mean()).backward()
        found.append((block.hidden.detach() + 0, leaf.grad, block.state_dict()["mean"] + 0))
    seen: list[Tensor] = []
    kept.up.register_forward_hook(lambda module, args, output: seen.append(output))
    kept(x)
    assert isinstance(seen[0], ShardedTensor)
    with pytest.raises(PlanError) as error:
        seen[0] + 1
    return [float((one - own).abs().max()) for one, own in zip(*found, strict=True)], str(error.value)


def test_what_a_block_keeps_is_whole_to_readers(workers: WorkerPools) -> None:
    for differences, told in workers(2).run(_kept):
        assert max(differences) < 1e-6
        assert "after the block's forward (aten.add.Tensor)" in told


def _noisy_router(make: Callable[[], nn.Module]) -> list[Tensor]:
    """Output and gradients with experts that score alike, but for a rounding error on the last rank."""
    torch.manual_seed(0)
    block, args = make(), (tokens(WIDTH),)
    with torch.no_grad():
        block.gate.weight[1:] = block.gate.weight[0]
    dense = copy.deepcopy(block)
    apply_block(block, plan_block(block, args, {}, size=2), _mesh(2))
    if dist.get_rank() == 1:
        gate = block.gate.weight.to_local()
        gate.data[1] += torch.finfo(torch.float32).eps * gate.data[1].abs()
    output = block(*args)
    output.sum().backward()
    torch.testing.assert_close(output, dense(*args))
    return [output.detach(), block.gate.weight.grad.to_local()]


@pytest.mark.parametrize("make", [partial(Stacked, by_mask), Modules])
def test_ranks_route_alike_where_their_scores_differ_by_rounding(workers: WorkerPools, make: Any) -> None:
    first, second = workers(2).run(_noisy_router, make, timeout=60)
    for own, other in zip(first, second, strict=True):
        torch.testing.assert_close(own, other)
