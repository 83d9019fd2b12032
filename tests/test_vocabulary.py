"""Vocabulary parallel: embedding, head and cross entropy on shards give what one process gives, and nothing is gathered
that need not be.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from lightning_3d.tensor import plan_block
from lightning_3d.tensor.vocabulary.head_call import HeadCall
from lightning_3d.tensor.vocabulary.lazy_tensor import lazy_logits
from lightning_3d.tensor.vocabulary.sharded_classes import ShardedClasses, shard_bounds
from lightning_3d.tensor.vocabulary.weight_roles import find_vocabulary, with_vocabulary
from lightning_3d.trace.output_uses import ShardedLogits
from tests.collectives import Collectives
from tests.models import TinyGPT
from tests.parity import Job, Layout, assert_parity, run_layout
from tests.workers import WorkerPools


def _mesh() -> DeviceMesh:
    return init_device_mesh("cpu", (torch.distributed.get_world_size(),), mesh_dim_names=("tp",))


# ----------------------------------------------------------------------------------------------- logits on shards


def _logits(local: Tensor, num_classes: int, mesh: DeviceMesh) -> Tensor:
    return lazy_logits(HeadCall(local, None, None, classes=ShardedClasses(num_classes, mesh), num_classes=num_classes))


def _compare(full: Tensor, use: Callable[[Tensor], Tensor], mesh: DeviceMesh) -> None:
    """`use` of logits on shards sends twice, and gives the value and the gradient that it gives of plain ones."""
    start, stop = shard_bounds(full.shape[-1], mesh)
    dense = full.clone().requires_grad_()
    local = full[..., start:stop].clone().requires_grad_()
    expected = use(dense)
    with Collectives() as counted:
        result = use(_logits(local, full.shape[-1], mesh))
        expected.backward()
        result.backward()
    assert sum(counted.counts.values()) == 2, counted.counts
    assert result.dtype == expected.dtype
    torch.testing.assert_close(result, expected, rtol=1e-5, atol=1e-6, equal_nan=True)
    assert local.grad is not None
    assert dense.grad is not None
    torch.testing.assert_close(local.grad, dense.grad[..., start:stop], rtol=1e-5, atol=1e-7, equal_nan=True)


def _cross_entropies(num_classes: int) -> None:
    mesh = _mesh()
    generator = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn(6, num_classes, generator=generator)
    targets = torch.tensor([0, num_classes - 1, 3, -100, 1, 2])
    _compare(logits.double(), lambda x: F.cross_entropy(x, targets, label_smoothing=0.3), mesh)
    _compare(logits[:2], lambda x: F.cross_entropy(x, torch.tensor([-100, -100])), mesh)  # NaN
    masked = logits.clone()
    masked[:, 2] = float("-inf")
    _compare(masked[:3], lambda x: F.cross_entropy(x, targets[:3]), mesh)
    masked[0] = float("nan")
    _compare(masked[:3], lambda x: F.cross_entropy(x, targets[:3], ignore_index=0), mesh)
    with pytest.raises((IndexError, RuntimeError), match="out of bounds"):  # on every rank
        F.cross_entropy(
            _logits(logits[..., slice(*shard_bounds(num_classes, mesh))], num_classes, mesh),
            torch.full((6,), num_classes),
        )


def test_cross_entropy_of_what_is_no_number_or_no_class(workers: WorkerPools) -> None:
    workers(2).run(_cross_entropies, 7)


# ------------------------------------------------------------------------------------------------------- training


class FirstRankLooks(TinyGPT):
    """Reads its logits on one rank only."""

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        logits = self(batch[0])
        loss = F.cross_entropy(logits.flatten(0, 1), batch[1].flatten())
        if self.global_rank == 0:
            self.seen = logits.argmax(-1).tolist()
        self.log("loss", loss, on_step=True, on_epoch=True, sync_dist=True)
        return loss


def test_a_table_is_cut_and_logits_are_read_on_one_rank(workers: WorkerPools) -> None:
    job = Job(model=FirstRankLooks)
    ranks = run_layout(workers, job, Layout(tp=2))
    assert_parity(job, ranks)
    assert ranks[0].plan is not None
    plans: Any = {block.fqn: block.tensor for block in ranks[0].plan.blocks}
    assert {plans[fqn].weight("weight").role for fqn in ("tokens", "head")} == {"vocabulary"}


IDS = torch.empty(2, 8, dtype=torch.int64, device="meta")


def _role(block: nn.Module, example: Tensor, *, size: int = 2, logits: ShardedLogits | None = None) -> str:
    use = find_vocabulary(block, (example,), {}, size=size, logits=logits)
    rest = plan_block(block, (example,), {}, size=size, excluded=[block.get_parameter(fqn) for fqn in use.fqns])
    return with_vocabulary(rest, use).weight("weight").role


def test_tables_that_can_be_cut() -> None:
    assert _role(nn.Embedding(64, 16), IDS) == "vocabulary"
    assert _role(nn.Embedding(63, 16, padding_idx=0), IDS, size=4) == "vocabulary"
    assert _role(nn.Embedding(8, 16), IDS) == "replicate"  # smaller than the matrices of a block
    assert _role(nn.Embedding(5, 2), IDS, size=4) == "replicate"  # nothing would be left for the last rank
    for option in ({"max_norm": 1.0}, {"sparse": True}, {"scale_grad_by_freq": True}):
        assert _role(nn.Embedding(64, 16, **option), IDS) == "replicate"
