"""The interpreter over any axis, with sharding that begins at an input: as context parallel will use it."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from lightning_3d.tensor.axis import MeshAxis
from lightning_3d.tensor.collectives import cut
from lightning_3d.tensor.interpret import Interpreter
from lightning_3d.tensor.placement import Shard
from lightning_3d.tensor.sharded_tensor import ShardedTensor
from tests.collectives import Collectives, by_kind
from tests.models import Block
from tests.workers import WorkerPools

DIMS = {"batch": 0, "sequence": 1}


def _mlp() -> nn.Module:
    return nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32), nn.LayerNorm(32))


def _run(name: str, dim: int) -> tuple[bool, float, dict[str, int], dict[str, int]]:
    """Whether the output is sharded like the input, the greatest difference, and the collectives of both directions."""
    torch.manual_seed(0)
    axis = MeshAxis(init_device_mesh("cpu", (2,), mesh_dim_names=("cp",)))
    block, x = (_mlp() if name == "mlp" else Block(32, 4)), torch.randn(4, 8, 32)
    dense, expected_x = copy.deepcopy(block), x.clone().requires_grad_()
    expected = dense(expected_x)
    expected.sin().sum().backward()
    x.requires_grad_()
    own_x = ShardedTensor(cut(x, axis, Shard(dim)), axis, Shard(dim))
    with Collectives() as forward, Interpreter(axis):
        output = block(own_x)
    is_sharded = isinstance(output, ShardedTensor) and output.placement == Shard(dim)
    own = output.local if isinstance(output, ShardedTensor) else cut(output, axis, Shard(dim))
    with Collectives() as backward:
        own.sin().sum().backward()  # of this rank's part of the loss
    pairs: list[tuple[Tensor | None, Tensor | None]] = [
        (own, expected.chunk(2, dim)[axis.rank]),
        (x.grad, expected_x.grad),
    ]
    pairs += [(p.grad, q.grad) for p, q in zip(block.parameters(), dense.parameters(), strict=True)]
    assert all(found is not None and wanted is not None for found, wanted in pairs)
    difference = max(float((found - wanted).abs().max()) for found, wanted in pairs)  # type: ignore[operator]
    return is_sharded, difference, dict(by_kind(forward.sent)), dict(by_kind(backward.sent))


@pytest.mark.parametrize("dim", DIMS.values(), ids=DIMS)
def test_what_works_row_by_row_communicates_gradients_alone(workers: WorkerPools, dim: int) -> None:
    for is_sharded, difference, forward, backward in workers(2).run(_run, "mlp", dim):
        assert is_sharded
        assert difference < 1e-4
        assert forward == {}
        assert backward == {"all-reduce": 8, "all-gather": 1}  # the parameters, and the input that was cut


def test_attention_runs_on_own_samples(workers: WorkerPools) -> None:
    for is_sharded, difference, forward, _ in workers(2).run(_run, "block", DIMS["batch"]):
        assert is_sharded
        assert difference < 1e-4
        assert forward == {}


def test_attention_gathers_a_sharded_sequence(workers: WorkerPools) -> None:
    for _, difference, forward, _ in workers(2).run(_run, "block", DIMS["sequence"]):
        assert difference < 1e-4
        assert forward["all-gather"] == 3  # queries, keys and values
