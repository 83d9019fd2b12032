"""Context parallel with ZeRO-3, tensor parallel and a pipeline, against each alone.

    python -m benchmarks.context_layouts [LENGTH]

Two sequences of 2048 tokens a step unless another length is given, the model of `benchmarks.context_step`. Peaks and
CPU time as there, of the rank that takes most, as parts of those of one process; an even share is 1 / ranks.
"""

from __future__ import annotations

import sys
from functools import partial
from typing import Any

import lightning as L
import torch.distributed as dist
from rich.console import Console
from rich.table import Table

from benchmarks.context_step import STEPS, VOCABULARY, Measured, config_of
from benchmarks.launch import run_ranks
from benchmarks.llama_step import Llama
from benchmarks.models import random_tokens
from benchmarks.quiet_trainer import quiet_trainer
from lightning_3d import ThreeDStrategy

SEQUENCES = 2  # in a step
LAYOUTS: dict[str, dict[str, int]] = {
    "context 2": {"context_parallel_size": 2},
    "ZeRO-3 on data 2": {"data_parallel_size": 2, "zero": 3},
    "tensor 2": {"tensor_parallel_size": 2},
    "pipeline 2": {"pipeline_parallel_size": 2},
    "context 2, ZeRO-3 over it": {"context_parallel_size": 2, "zero": 3},
    "context 2 x data 2, ZeRO-3 over both": {"context_parallel_size": 2, "data_parallel_size": 2, "zero": 3},
    "context 2 x tensor 2": {"context_parallel_size": 2, "tensor_parallel_size": 2},
    "context 2 x pipeline 2": {"context_parallel_size": 2, "pipeline_parallel_size": 2},
}
"""Sizes and the stage of ZeRO; 1 where none is given."""


def _run(length: int, sizes: dict[str, int]) -> tuple[float, int]:
    """Train; the greatest seconds of a step and peak in bytes of a rank."""
    num_ranks, measured = dist.get_world_size(), Measured()
    L.seed_everything(1, verbose=False)
    settings: dict[str, Any] = {**sizes, "zero": {"stage": sizes.get("zero", 1)}}
    if "pipeline_parallel_size" in sizes:
        settings["pipeline"] = {"num_microbatches": SEQUENCES}
    strategy = ThreeDStrategy(**settings) if num_ranks > 1 else "auto"
    trainer = quiet_trainer(strategy, num_ranks, STEPS, measured)
    own = SEQUENCES // sizes.get("data_parallel_size", 1)
    model = Llama(config_of(length))
    trainer.fit(model, random_tokens(STEPS * SEQUENCES // own, own, length, VOCABULARY))
    everyone: list[Any] = [None] * num_ranks
    dist.all_gather_object(everyone, (min(measured.seconds[2:-1]), measured.peak))
    seconds, peaks = zip(*everyone, strict=True)
    return max(seconds), max(peaks)


def main(length: int = 2048) -> None:
    """Print the table."""
    alone, peak_alone = run_ranks(partial(_run, sizes={}), 1, length)
    table = Table("layout", "ranks", "peak", "CPU time", "an even share", title=f"{SEQUENCES} sequences of {length}")
    table.add_row("one process", "1", f"{peak_alone / 2**20:.0f} MiB", f"{alone:.2f} s", "")
    for name, sizes in LAYOUTS.items():
        num_ranks = 2 ** sum(size == 2 for size in sizes.values())
        seconds, peak = run_ranks(partial(_run, sizes=sizes), num_ranks, length)
        table.add_row(
            name, str(num_ranks), f"{peak / peak_alone:.3f}", f"{seconds / alone:.3f}", f"{1 / num_ranks:.3f}"
        )
    Console().print(table)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
