"""Step time and peak memory with optimizer states on the device, in host memory and in files.

    python -m benchmarks.offload_step [DIRECTORY]

The GPT of `benchmarks.models` with 98 million parameters and fused AdamW at ZeRO stage 1, with offloaded parameters at
3, on one and two processes. Figures are ratios to stage 1 without offloading: of the median step, of the CPU time from
before the optimizer's step to the end of the batch, and of the peak memory of the process beyond what it held before
the model. glibc's allocator is told to give back what is freed. On a CPU host memory is the device's, so that only the
work in windows is left to measure there.
"""

from __future__ import annotations

import os
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.data_parallel_step import train
from benchmarks.launch import run_ranks
from benchmarks.models import GPT, random_tokens
from lightning_3d import ThreeDStrategy

WIDTH, LAYERS, VOCABULARY, BATCH, LENGTH, WARM_UP, STEPS = 768, 12, 8192, 1, 64, 1, 3


class _Timed(GPT):
    """Notes the CPU seconds of its optimizer's steps, of all threads."""

    def __init__(self) -> None:
        super().__init__(VOCABULARY, WIDTH, LAYERS, num_heads=12)
        self.seconds: list[float] = []

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3, fused=True)

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        self.begin = time.process_time()

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.seconds.append(time.process_time() - self.begin)


def _measure(num_ranks: int, zero: Mapping[str, Any]) -> dict[str, float]:
    before = _peak_memory()
    torch.manual_seed(0)
    model = _Timed()
    batches = random_tokens(WARM_UP + STEPS, BATCH, LENGTH, VOCABULARY)
    step = train(ThreeDStrategy(zero={**zero, "show_gradients": False}), num_ranks, model, batches, WARM_UP)
    optimizer = statistics.median(model.seconds[WARM_UP:])
    return {"step": step, "optimizer": optimizer, "memory": _peak_memory() - before}


def _peak_memory() -> float:
    return float(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss) * 1024


def main() -> None:
    """Print the table."""
    os.environ["MALLOC_MMAP_THRESHOLD_"] = str(2**20)  # of the processes that are started
    table = Table("processes", "offloaded", "step", "optimizer's CPU time", "peak memory", title="ratios to none")
    with tempfile.TemporaryDirectory(dir=sys.argv[1] if len(sys.argv) > 1 else None) as directory:
        for num_ranks in (1, 2):
            none = run_ranks(_measure, num_ranks, num_ranks, {"stage": 1})
            places = {
                "optimizer to cpu": {"stage": 1, "offload_optimizer": "cpu"},
                "optimizer to files": {"stage": 1, "offload_optimizer": directory},
                "both to files": {"stage": 3, "offload_optimizer": directory, "offload_params": directory},
            }
            table.add_row(str(num_ranks), "none", *(_told(name, value) for name, value in none.items()))
            for name, zero in places.items():
                found = run_ranks(_measure, num_ranks, num_ranks, zero)
                table.add_row("", name, *(f"{found[key] / none[key]:.2f}" for key in none))
    Console().print(table)


def _told(name: str, value: float) -> str:
    return f"{value / 2**20:,.0f} MiB" if name == "memory" else f"{value * 1e3:,.0f} ms"


if __name__ == "__main__":
    main()
