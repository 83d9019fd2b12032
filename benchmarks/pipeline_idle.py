"""Idle share of every schedule on four ranks, against its theory.

    python -m benchmarks.pipeline_idle

The blocks sleep instead of computing, so two cores suffice for four ranks. Theory, with p ranks, m microbatches and v
stages per rank: (p - 1) / (m + p - 1) for GPipe and 1F1B, (p - 1) / (v m + p - 1) for interleaved 1F1B (Narayanan et
al. 2021, https://arxiv.org/abs/2104.04473). For the zero-bubble schedules it is the idle share of the schedule's plan
played without time for communication.
"""

from __future__ import annotations

import time
from typing import Any

import lightning as L
import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.launch import run_ranks
from benchmarks.quiet_trainer import quiet_trainer
from lightning_3d import ThreeDStrategy
from lightning_3d.callbacks import ScheduleTimeline
from lightning_3d.pipeline.spans import Timeline
from lightning_3d.planning.timing import idle_share

RANKS, SECONDS = 4, 0.1
SCHEDULES = ("gpipe", "1f1b", "interleaved", "interleaved_zero_bubble", "zbv")


class _Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, forward: float, backward: float) -> Tensor:
        ctx.backward_seconds = backward
        time.sleep(forward)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        time.sleep(ctx.backward_seconds)
        return gradients[0], None, None


class SleepingBlock(nn.Module):
    """Sleeps for a forward, for the gradient of its input, and for that of its weight, equally long."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds = seconds
        self.weight = nn.Parameter(torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        x = _Sleep.apply(x, self.seconds, self.seconds)
        return x * _Sleep.apply(self.weight, 0.0, self.seconds)


class SleepingModel(L.LightningModule):
    """Blocks in a row."""

    def __init__(self, num_blocks: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(SleepingBlock(SECONDS * RANKS / num_blocks) for _ in range(num_blocks))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        x = batch[0].clone().requires_grad_()  # so that the first block has an input gradient to sleep for
        for block in self.blocks:
            x = block(x)
        return x.square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-3)


def measure(schedule: str, num_microbatches: int) -> Timeline | None:
    """One step of a schedule."""
    num_stages = RANKS * (1 if schedule in ("gpipe", "1f1b") else 2)
    timeline = ScheduleTimeline(f"runs/timelines/{schedule}_{num_microbatches}.png", step=1)
    trainer = quiet_trainer(
        ThreeDStrategy(
            pipeline_parallel_size=RANKS,
            pipeline={"num_microbatches": num_microbatches, "schedule": schedule, "partition": "uniform"},
        ),
        RANKS,
        2,
        timeline,
    )
    trainer.fit(
        SleepingModel(num_stages), DataLoader(TensorDataset(torch.ones(2 * num_microbatches, 8)), num_microbatches)
    )
    return timeline.timeline


def theory(schedule: str, num_microbatches: int, timeline: Timeline) -> float:
    """The idle share that the schedule promises."""
    if schedule in ("gpipe", "1f1b"):
        return (RANKS - 1) / (num_microbatches + RANKS - 1)
    if schedule == "interleaved":
        return (RANKS - 1) / (2 * num_microbatches + RANKS - 1)
    return idle_share(timeline.planned)


def main() -> None:
    """Print the table."""
    table = Table(
        "schedule", "microbatches", "theory", "measured", "measured / theory", title=f"idle share, {RANKS} ranks"
    )
    for schedule in SCHEDULES:
        for num_microbatches in (8, 16):
            timeline = run_ranks(measure, RANKS, schedule, num_microbatches)
            expected, found = theory(schedule, num_microbatches, timeline), idle_share(timeline.measured)
            table.add_row(schedule, str(num_microbatches), f"{expected:.1%}", f"{found:.1%}", f"{found / expected:.2f}")
    Console().print(table)


if __name__ == "__main__":
    main()
