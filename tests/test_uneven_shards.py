"""Heads and tokens that ranks do not divide are shared out unevenly, and blocks compute what they compute whole."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from lightning_3d.tensor import BlockTensorPlan, plan_block, verify_block
from tests.law.models import spellings as b
from tests.models import Block
from tests.workers import WorkerPools

BLOCKS: dict[str, Callable[[int, int], nn.Module]] = {
    "projections": Block,
    "by_view": partial(b.FusedQKV, b.by_view),
    "eager": b.Rotary,
}


def _proofs(num_heads: int, num_tokens: int, sequence_parallel: bool) -> dict[str, tuple[str, BlockTensorPlan]]:
    """Name of a block -> what its proof has found wrong, and its plan."""
    size = dist.get_world_size()
    mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("tp",))
    proofs = {}
    for name, make in BLOCKS.items():
        torch.manual_seed(0)
        block = make(8 * num_heads, num_heads)
        example = torch.randn(2, num_tokens, 8 * num_heads, requires_grad=True)
        plan = plan_block(block, (example,), {}, size=size, sequence_parallel=sequence_parallel)
        proof = verify_block(block, plan, (example,), {}, mesh)
        proofs[name] = ("" if proof.passed else str(proof), plan)
    return proofs


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_ranks_get_whole_heads(workers: WorkerPools, sequence_parallel: bool) -> None:
    proofs = workers(4).run(_proofs, 6, 6, sequence_parallel)[0]  # 2, 2, 2 and no heads, or tokens
    for name, (failure, plan) in proofs.items():
        assert not failure, f"{name}: {failure}"
        assert plan.sharded_share > 0.98, f"{name}: {plan}"
        assert plan.is_sequence_parallel == sequence_parallel
        kinds = {made.kind for made in plan.collectives if not made.is_backward}
        expected = {"all-gather", "reduce-scatter"} if sequence_parallel else {"all-reduce"}
        assert kinds == expected | {"all-to-all"}, name
