"""Memory and time before the first step, against those of training.

    python -m benchmarks.first_steps

Two processes train a GPT of width 256 with 8 layers and a vocabulary of 8192, on batches of 16 x 128 tokens. The bar:
the peak while a model is planned and proved is at most that of training. Then the first step, which studies the loss
with a pipeline.
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
    """Notes when the model is set up and the first step ends, and the peaks of resident memory until then and after."""

    def __init__(self) -> None:
        self._start = time.perf_counter()
        self.seconds: list[float] = []
        self.peaks: list[float] = []

    def on_fit_start(self, *args: Any) -> None:
        self._note()

    def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
        if trainer.global_step in (1, STEPS):
            self._note()

    def _note(self) -> None:
        self.seconds.append(time.perf_counter() - self._start)
        lines = Path("/proc/self/status").read_text().splitlines()
        self.peaks.append(int(next(line for line in lines if line.startswith("VmHWM")).split()[1]) / 1024)
        Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM


def measure(layout: str) -> list[tuple[list[float], list[float]]]:
    """By rank: seconds, and MiB at the peak since: until the model is set up, until the first step, in later steps."""
    model, data = GPT(VOCABULARY), random_tokens(STEPS, BATCH, LENGTH, VOCABULARY)
    peaks = _Peaks()
    trainer = quiet_trainer(ThreeDStrategy(**LAYOUTS[layout]), 2, STEPS, peaks)
    trainer.fit(model, data)
    mine = (peaks.seconds, peaks.peaks)
    everyone = [mine] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    return everyone


def main() -> None:
    """Print the table."""
    table = Table("", "rank", "set up s", "first step s", "set up MiB", "first step MiB", "steps MiB", "ratio")
    for layout in LAYOUTS:
        for rank, ((set_up, first, _), peaks) in enumerate(run_ranks(measure, 2, layout)):
            ratio = max(peaks[:2]) / peaks[2]
            mib = [f"{peak:.0f}" for peak in peaks]
            table.add_row(layout, str(rank), f"{set_up:.1f}", f"{first - set_up:.1f}", *mib, f"{ratio:.2f}")
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
