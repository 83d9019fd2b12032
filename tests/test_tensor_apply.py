"""Experts whose scores differ by rounding between ranks; that blocks run as one process would is in tests/law."""

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

from lightning_3d.tensor import apply_block, plan_block
from tests.law.models.experts import WIDTH, Modules, Stacked, by_mask
from tests.test_tensor_plan import tokens
from tests.workers import WorkerPools


def _mesh(size: int) -> DeviceMesh:
    return init_device_mesh("cpu", (size,), mesh_dim_names=("tp",))


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
