"""Hybrid sharding: groups of data-parallel ranks share the training state, and each group holds all of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import lightning as L
import pytest
import torch
from torch import Tensor

from lightning_3d import ThreeDStrategy
from lightning_3d.distributed.mesh import MeshShape, build_mesh
from tests.models import TinyGPT, loader, tokens
from tests.parity import QUIET
from tests.workers import WorkerPools

Stage = Literal[1, 2, 3]


def _groups() -> tuple[list[int], list[int]]:
    mesh = build_mesh(MeshShape(pp=1, dp=4, cp=1, tp=1), zero_stage=3, device_type="cpu", shard_size=2)
    ranks = torch.distributed.get_process_group_ranks
    return ranks(mesh.device_mesh["dp_shard"].get_group()), ranks(mesh.group("dp"))


def test_groups_are_consecutive_ranks(workers: WorkerPools) -> None:
    everyone = [0, 1, 2, 3]
    groups = [([0, 1], everyone), ([0, 1], everyone), ([2, 3], everyone), ([2, 3], everyone)]
    assert workers(4).run(_groups) == groups


def _train(ranks: int, zero: dict[str, Any], folder: bool, epochs: int, path: Path) -> dict[str, Tensor]:
    L.seed_everything(1, verbose=False)
    trainer = L.Trainer(
        strategy=ThreeDStrategy(zero=zero, save_distributed_checkpoint=folder),
        devices=ranks,
        max_epochs=epochs,
        enable_checkpointing=False,
        limit_val_batches=0,
        **QUIET,
    )
    model = TinyGPT(num_layers=2, width=16, tied=False)
    data = loader(tokens(16), global_batch_size=8, data_parallel_size=ranks)
    trainer.fit(model, data, ckpt_path=str(path) if path.exists() else None)
    trainer.save_checkpoint(path)
    with trainer.strategy.summon_full_params():  # type: ignore[attr-defined]
        return {fqn: value.detach().clone() for fqn, value in model.named_parameters()}


@pytest.mark.parametrize(
    ("stage", "folder"),
    [
        (1, False),
        (3, True),
    ],
)
def test_resumed_in_another_layout(workers: WorkerPools, tmp_path: Path, stage: Stage, folder: bool) -> None:
    hybrid, path = {"stage": stage, "shard_size": 2}, tmp_path / "first.ckpt"
    expected, *_ = workers(2).run(_train, 2, {"stage": 0}, False, 3, tmp_path / "whole.ckpt")
    workers(4).run(_train, 4, hybrid, folder, 1, path)
    workers(2).run(_train, 2, {"stage": 4 - stage}, folder, 2, path)
    for weights in workers(4).run(_train, 4, hybrid, folder, 3, path):
        for fqn, value in expected.items():
            torch.testing.assert_close(weights[fqn], value, atol=1e-5, rtol=0)
