"""Memory and time before the first step, against those of training.

    python -m benchmarks.first_steps

Two processes train a GPT of width 256 with 8 layers and a vocabulary of 8192, on batches of 16 x 128 tokens. The bar:
the peak while a model is planned and proved is at most that of training.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import lightning as L
import torch.distributed as dist
from rich.console import Console
from rich.table import Table

from benchmarks.launch import run_ranks
from benchmarks.models import GPT, random_tokens
from benchmarks.quiet_trainer import quiet_trainer
from lightning_3d import ThreeDStrategy

VOCABULARY, BATCH, LENGTH, STEPS = 8192, 16, 128, 4
LAYOUTS: dict[str, dict[str, Any]] = {
    "tp 2": {"tensor_parallel_size": 2},
    "tp 2, not proved": {"tensor_parallel_size": 2, "tensor": {"verify": False}},
    "pp 2": {"pipeline_parallel_size": 2, "pipeline": {"num_microbatches": 4}},
}


class _Peaks(L.Callback):
    """Notes when the model is set up and the first step ends, and the peaks of resident memory before and in steps."""

    def __init__(self) -> None:
        self.start = time.perf_counter()
        self.set_up = self.first_step = 0.0
        self.planning = self.training = 0.0

    def on_fit_start(self, *args: Any) -> None:
        self.set_up = time.perf_counter() - self.start
        self.planning = _peak_memory()
        Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM

    def on_train_batch_end(self, *args: Any) -> None:
        self.first_step = self.first_step or time.perf_counter() - self.start
        self.training = _peak_memory()


def _peak_memory() -> float:
    """MiB of this process's resident memory at its peak."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("VmHWM")).split()[1]) / 1024


def measure(layout: str) -> list[tuple[float, float, float, float]]:
    """By rank: seconds to the end of planning and of the first step, MiB at the peak until then and in training."""
    model, data = GPT(VOCABULARY), random_tokens(STEPS, BATCH, LENGTH, VOCABULARY)
    peaks = _Peaks()
    trainer = quiet_trainer(ThreeDStrategy(**LAYOUTS[layout]), 2, STEPS, peaks)
    trainer.fit(model, data)
    mine = (peaks.set_up, peaks.first_step, peaks.planning, peaks.training)
    everyone = [mine] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    return everyone


def main() -> None:
    """Print the table."""
    table = Table("", "rank", "set up s", "first step s", "peak MiB\nbefore steps", "peak MiB\nin steps", "ratio")
    for layout in LAYOUTS:
        for rank, (set_up, first, planning, training) in enumerate(run_ranks(measure, 2, layout)):
            seconds, mib = (f"{set_up:.1f}", f"{first:.1f}"), (f"{planning:.0f}", f"{training:.0f}")
            table.add_row(layout, str(rank), *seconds, *mib, f"{planning / training:.2f}")
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
