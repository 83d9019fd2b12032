"""Time to trace a step, and how many steps trace.

    python -m benchmarks.trace_time

The bar for a 48-block model is 2 s; steps of a known batch signature must not trace.
"""

from __future__ import annotations

import itertools
import statistics
import time
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.launch import run_ranks
from benchmarks.models import GPT, random_tokens
from benchmarks.quiet_trainer import quiet_trainer
from lightning_3d import ThreeDStrategy
from lightning_3d.model.blocks import find_blocks
from lightning_3d.pipeline.effects.step_effects import StepEffects
from lightning_3d.trace.interception import routed
from lightning_3d.trace.step_tracing import StepTracing

NUM_BLOCKS, STEPS, MICROBATCHES = 48, 20, 2


class Counting(GPT):
    """Counts the calls of its ``training_step``."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.calls = itertools.count()

    def training_step(self, *args: Any) -> Any:
        """As that of a GPT."""
        next(self.calls)
        return super().training_step(*args)


def trace_seconds() -> list[float]:
    """Seconds of five traces; the first one also warms torch up."""
    model = GPT(width=64, num_layers=NUM_BLOCKS)
    blocks = find_blocks(model)
    batch = next(iter(random_tokens(1, 4, 32)))
    seconds = []
    with routed(blocks) as router:
        effects = StepEffects(model, router)
        tracing = StepTracing(model, router, effects, torch.device("cpu"))
        for _ in range(5):
            start = time.perf_counter()
            trace = tracing("training_step", batch, (0,))
            seconds.append(time.perf_counter() - start)
            assert len(trace.block_calls) == NUM_BLOCKS + 3
    return seconds


def count_traces() -> int:
    """Traces that a run of ``STEPS`` steps with one batch signature makes on a rank: each runs the step once more."""
    trainer = quiet_trainer(
        ThreeDStrategy(pipeline_parallel_size=2, pipeline={"num_microbatches": MICROBATCHES}), 2, STEPS
    )
    model = Counting(width=32, num_layers=4)
    trainer.fit(model, random_tokens(STEPS, 4, 16))
    return next(model.calls) - STEPS * MICROBATCHES


def main() -> None:
    """Print the table."""
    first, *others = trace_seconds()
    table = Table("", "", title=f"tracing a model of {NUM_BLOCKS} blocks")
    table.add_row("first trace", f"{first:.2f} s")
    table.add_row("further traces (median)", f"{statistics.median(others):.2f} s")
    table.add_row(f"traces in {STEPS} steps, one at set-up", str(run_ranks(count_traces, 2)))
    Console().print(table)


if __name__ == "__main__":
    main()
