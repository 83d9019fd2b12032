"""What a rank holds in memory while it gets its part of the model: its stage and one block, never the whole, except for
rank 0 where it builds the model.
"""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any, Literal

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_3d import ThreeDStrategy
from tests.parity import QUIET
from tests.workers import WorkerPools

WIDTH, NUM_BLOCKS = 2400, 8
MIB = 2**20
BLOCK = WIDTH * WIDTH * 4 / MIB
SLACK = 40
"""MiB for what a process allocates besides weights."""

UNIFORM = {"partition": "uniform"}
Where = Literal["configure_model", "init_module", "before", "meta"]


class Wide(L.LightningModule):
    """Blocks of 22 MiB, initialised twice as many models do: by torch, and again by their author."""

    def __init__(self, where: Where) -> None:
        super().__init__()
        self.where = where
        self.layers = nn.Sequential()
        if where != "configure_model":
            self.build()

    def build(self) -> None:
        self.layers = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(NUM_BLOCKS)))
        self.apply(self.init_weights)

    def init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=0.02)
            module.weight.data.div_(2.0)

    def configure_model(self) -> None:
        if len(self.layers) == 0:
            self.build()

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss: Tensor = self.layers(batch[0]).square().mean()
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class _Peak(L.Callback):
    """Notes the peak of this process until the model has been set up."""

    peak = 0.0

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.peak = _status("VmHWM")


def _status(key: str) -> float:
    """A value of /proc/self/status in MiB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(key)).split()[1]) / 1024


def _growth(where: Where, zero: int, pp: int, checkpoint: Path | None = None) -> tuple[float, float]:
    """MiB by which the peak until the first step exceeds the start, and MiB of parameters held then."""
    peak, strategy = _Peak(), ThreeDStrategy(pipeline_parallel_size=pp, zero={"stage": zero}, pipeline=UNIFORM)
    settings: dict[str, Any] = {**QUIET, "max_steps": 2, "callbacks": [peak], "enable_checkpointing": False}
    trainer = L.Trainer(strategy=strategy, devices=torch.distributed.get_world_size(), **settings)
    loader = DataLoader(TensorDataset(torch.ones(8, WIDTH)), batch_size=4)
    torch.manual_seed(0)
    ctypes.CDLL(None).mallopt(-3, 2**20)  # M_MMAP_THRESHOLD: what was freed goes back to the system
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    start = _status("VmRSS")
    with {"init_module": trainer.init_module(), "meta": torch.device("meta")}.get(where, nullcontext()):
        model = Wide(where)
    trainer.fit(model, loader, ckpt_path=checkpoint)
    held = sum(p.numel() * 4 for p in model.layers.parameters() if not p.is_meta)
    return peak.peak - start, held / MIB


@pytest.fixture
def fresh_workers() -> Iterator[WorkerPools]:
    """Processes whose heap holds nothing that was freed before."""
    with WorkerPools() as pools:
        yield pools


@pytest.mark.parametrize(
    ("where", "zero", "pp"),
    [
        ("configure_model", 1, 4),
        ("init_module", 3, 2),
    ],
)
def test_peak_is_the_stage_and_one_block(fresh_workers: WorkerPools, where: Where, zero: int, pp: int) -> None:
    for growth, held in fresh_workers(4).run(_growth, where, zero, pp)[1:]:
        assert held == pytest.approx(NUM_BLOCKS / pp * BLOCK, rel=0.01)
        told = f"peak {growth:.0f} MiB over the start for a stage of {held:.0f} MiB"
        assert held - SLACK <= growth <= held + BLOCK + SLACK, told


def _saved(path: Path) -> None:
    strategy = ThreeDStrategy(pipeline_parallel_size=4, save_distributed_checkpoint=True)
    trainer = L.Trainer(strategy=strategy, devices=4, max_steps=1, enable_checkpointing=False, **QUIET)
    trainer.fit(Wide("before"), DataLoader(TensorDataset(torch.ones(8, WIDTH)), batch_size=4))
    trainer.save_checkpoint(path)


def test_a_model_on_meta_is_held_whole_by_no_rank(
    workers: WorkerPools, fresh_workers: WorkerPools, tmp_path: Path
) -> None:
    workers(4).run(_saved, tmp_path / "saved")
    for growth, held in fresh_workers(4).run(_growth, "meta", 1, 4, tmp_path / "saved"):
        assert held == pytest.approx(NUM_BLOCKS / 4 * BLOCK, rel=0.01)
        told = f"peak {growth:.0f} MiB over the start for a stage of {held:.0f} MiB"
        assert held - SLACK <= growth <= held + BLOCK + SLACK, told
