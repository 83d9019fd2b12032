"""Peak memory and time of a step whose sequence is cut over ranks, against the same step on one process.

    python -m benchmarks.context_step [RANKS [LENGTH]]

A Llama of `transformers` with random weights in fp32, 4 layers of width 256 and 8 heads, and one sequence of 4096
tokens on 2 ranks unless other numbers are given. The peak is what torch's allocator has handed out at once in a step,
above weights, gradients and what the optimizer keeps. Time is CPU time of the slowest rank, as ranks share the cores of
one machine. In theory both are 1 / RANKS; the bar for memory is 0.04 above that.
"""

from __future__ import annotations

import sys
import time
from typing import Any

import lightning as L
import torch.distributed as dist
from rich.console import Console
from rich.table import Table

from benchmarks.launch import run_ranks
from benchmarks.llama_step import Llama
from benchmarks.measured_memory import AllocatedPeak
from benchmarks.models import random_tokens
from benchmarks.quiet_trainer import quiet_trainer
from lightning_3d import ThreeDStrategy

CONFIG: dict[str, Any] = {
    "vocab_size": 2048,
    "hidden_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "intermediate_size": 688,
}
STEPS = 5


class Measured(L.Callback):
    """CPU time of the steps after the first two, and the peak of the last."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.peak = 0

    def on_train_batch_start(self, trainer: L.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == STEPS - 1:
            self._allocated = AllocatedPeak()
            self._allocated.start()
            self._allocated.mark()
        self._start = time.process_time()

    def on_before_optimizer_step(self, trainer: L.Trainer, *args: Any) -> None:
        self.seconds.append(time.process_time() - self._start)

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == STEPS - 1:
            self.peak = self._allocated.stop()


def run(length: int) -> list[tuple[float, int]]:
    """Train; the seconds of a step and the peak in bytes of each rank."""
    num_ranks, measured = dist.get_world_size(), Measured()
    L.seed_everything(1, verbose=False)
    model = Llama({**CONFIG, "max_position_embeddings": length})
    strategy = ThreeDStrategy(context_parallel_size=num_ranks) if num_ranks > 1 else "auto"
    quiet_trainer(strategy, num_ranks, STEPS, measured).fit(
        model, random_tokens(STEPS, 1, length, CONFIG["vocab_size"])
    )
    everyone: list[Any] = [None] * num_ranks
    dist.all_gather_object(everyone, (min(measured.seconds[2:-1]), measured.peak))
    return everyone


def main(num_ranks: int = 2, length: int = 4096) -> None:
    """Print the table."""
    ((alone, peak),), ranks = run_ranks(run, 1, length), run_ranks(run, num_ranks, length)
    table = Table(title=f"a step on {num_ranks} ranks, {length} tokens")
    for column in ("", "one process", "a rank", "ratio"):
        table.add_column(column)
    seconds, most = max(s for s, _ in ranks), max(p for _, p in ranks)
    table.add_row("peak, MiB", f"{peak / 2**20:.0f}", f"{most / 2**20:.0f}", f"{most / peak:.3f}")
    table.add_row("CPU s", f"{alone:.2f}", f"{seconds:.2f}", f"{seconds / alone:.3f}")
    Console().print(table)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
