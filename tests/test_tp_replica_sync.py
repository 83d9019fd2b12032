"""Tensors that all ranks of a tensor-parallel group hold stay the same on all of them, whatever rounding does."""

from __future__ import annotations

from unittest import mock

import lightning as L
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_3d.distributed import tp_replica_sync
from lightning_3d.distributed.mesh import is_shard
from lightning_3d.torch_internals.dtensor import part_of
from tests.models import TinyGPT
from tests.parity import Layout, fitted
from tests.workers import WorkerPools


class _Noise(L.Callback):
    """Before the third step a rank has other rounding errors in what all ranks of its tensor-parallel group hold."""

    @torch.no_grad()
    def on_before_optimizer_step(
        self, trainer: L.Trainer, pl_module: L.LightningModule, optimizer: torch.optim.Optimizer
    ) -> None:
        for parameter in (pl_module.get_parameter("norm.weight"), pl_module.get_parameter("blocks.0.norm1.weight")):
            local = part_of(parameter.detach())
            if dist.get_rank() == 1 and trainer.global_step == 2:
                local *= 1 + torch.finfo(local.dtype).eps


def _whole_weights(layout: Layout, precision: str) -> list[Tensor]:
    with mock.patch.object(tp_replica_sync, "PERIOD", 3):
        _, module = fitted(layout, TinyGPT, callbacks=[_Noise()], batches=3, epochs=1, precision=precision)
    whole = [parameter.detach() for parameter in module.parameters() if not is_shard(parameter, "tp")]
    assert len(whole) > 8
    return [part_of(parameter) for parameter in whole]


def test_what_is_not_sharded_stays_the_same(workers: WorkerPools) -> None:
    ranks = workers(4).run(_whole_weights, Layout(dp=2, tp=2, zero=3), "bf16-true")
    for first, second in zip(*ranks[:2], strict=True):
        assert torch.equal(first, second)
