"""Each way between placements gives the tensor, its gradient and the gradient of that as they have to lie."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from lightning_3d.sharding.axis import MeshAxis
from lightning_3d.sharding.collectives import placement_of_gradient, redistribute
from lightning_3d.sharding.placement import (
    REPLICATE,
    REPLICATE_PARTIAL_GRAD,
    InterleavedShard,
    Partial,
    Placement,
    Shard,
    Sharded,
)
from tests.workers import WorkerPools

EVEN = (Shard(0), Shard(1), InterleavedShard(dim=0, sizes=(4, 8), num_ranks=2))

UNEVEN = (Shard(0, (5, 5, 2)), Shard(1, (3, 3, 0)), Shard(1), Shard(0), Shard(0, (2, 10, 0)))

SHAPE = (12, 6)


def _part(full: Tensor, at: Placement, axis: MeshAxis) -> Tensor:
    """A rank's part; of a partial tensor one of terms that add up to it."""
    if isinstance(at, Sharded):
        return at.own(full, axis.size, axis.rank).clone()
    if not isinstance(at, Partial):
        return full.clone()
    terms = torch.randn(axis.size, *SHAPE, generator=torch.Generator().manual_seed(1))
    return terms[axis.rank] if axis.rank else full - terms[1:].sum(0)


def _is(part: Tensor, full: Tensor, at: Placement, axis: MeshAxis) -> bool:
    if isinstance(at, Partial) or at == REPLICATE_PARTIAL_GRAD:
        part, at = (axis.all_reduce(part.clone()), REPLICATE) if isinstance(at, Partial) else (part, REPLICATE)
    return torch.allclose(part, _part(full, at, axis), atol=1e-6)


def _wrong_ways(shards: tuple[Sharded, ...]) -> list[str]:
    axis = MeshAxis(init_device_mesh("cpu", (torch.distributed.get_world_size(),)))
    torch.manual_seed(0)
    full, gradient, again = torch.randn(3, *SHAPE)
    ways = [*product(shards, (*shards, REPLICATE, REPLICATE_PARTIAL_GRAD)), (REPLICATE, REPLICATE_PARTIAL_GRAD)]
    ways += [*product((REPLICATE, Partial()), shards), (Partial(), REPLICATE)]
    wrong = []
    for source, target in ways:
        x = _part(full, source, axis).requires_grad_()
        y = redistribute(x * 1.0, axis, source, target)
        back = _part(gradient, placement_of_gradient(target), axis).requires_grad_()
        (dx,) = torch.autograd.grad(y, x, back, create_graph=True)
        direction = _part(again, source, axis)
        (second,) = torch.autograd.grad(dx, back, direction)
        is_right = (
            _is(y.detach(), full, target, axis),
            _is(dx.detach(), gradient, placement_of_gradient(source), axis),
            _is(second, again, target, axis),
        )
        if not all(is_right):
            wrong.append(f"{source} -> {target}: {is_right}")
    return wrong


@pytest.mark.parametrize(("size", "shards"), [(2, EVEN), (3, UNEVEN)])
def test_every_way_has_its_values_and_gradients(workers: WorkerPools, size: int, shards: tuple[Sharded, ...]) -> None:
    assert workers(size).run(_wrong_ways, shards) == [[]] * size
