"""CPU time of Python per block, per step and per microbatch by layout, as ratios over a plain Trainer.

    python -m benchmarks.host_time

A GPU computes while Python runs ahead: Python's time matters where it is longer. Here tensors are tiny, so that next to
nothing else takes time. Two processes, a GPT of 4 and of 12 blocks: the difference of their steps is the time of eight
blocks. Layouts take turns in rounds; a figure is the median over the rounds of the ratio to plain in the same round.
Time is that of the threads that call Python (`time.thread_time`), forward and optimizer; the backward's of PyTorch runs
in the same thread on CPUs. On GPUs it runs in threads of its own.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import lightning as L
import torch
from rich.console import Console
from rich.table import Table

from benchmarks.launch import run_ranks
from benchmarks.models import GPT, random_tokens
from benchmarks.quiet_trainer import quiet_trainer
from lightning_3d import ThreeDStrategy

BATCH, LENGTH, VOCABULARY, WIDTH, FEW, MANY, WARM_UP, STEPS, ROUNDS = 8, 8, 32, 32, 4, 12, 8, 25, 3


class Clock(L.Callback):
    """CPU time of the thread that trains, from one batch's begin to its end."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self._start = 0.0

    def on_train_batch_start(self, *args: Any) -> None:
        """As Lightning calls it."""
        self._start = time.thread_time()

    def on_train_batch_end(self, *args: Any) -> None:
        """As Lightning calls it."""
        self.seconds.append(time.thread_time() - self._start)


def step(strategy: Callable[[], Any], num_ranks: int, num_blocks: int) -> float:
    """Seconds of a step."""
    torch.manual_seed(0)
    clock = Clock()
    trainer = quiet_trainer(strategy(), num_ranks, WARM_UP + STEPS, clock)
    model = GPT(VOCABULARY, width=WIDTH, num_layers=num_blocks)
    trainer.fit(model, random_tokens(WARM_UP + STEPS, BATCH, LENGTH, VOCABULARY))
    return statistics.median(clock.seconds[WARM_UP:])


def _ours(**settings: Any) -> Callable[[], Any]:
    return partial(ThreeDStrategy, **settings)


def _pipeline(num_microbatches: int) -> Callable[[], Any]:
    return _ours(pipeline_parallel_size=2, pipeline={"num_microbatches": num_microbatches})


LAYOUTS = {
    "ZeRO 1": _ours(zero={"stage": 1}),
    "ZeRO 3": _ours(zero={"stage": 3}),
    "tp 2": _ours(tensor_parallel_size=2, tensor={"verify": False}),
    "pp 2, 2 microbatches": _pipeline(2),
    "pp 2, 8 microbatches": _pipeline(8),
}


def _figures(strategy: Callable[[], Any], num_ranks: int) -> tuple[float, float]:
    """Seconds per block and seconds of the rest of a step, on the last rank."""
    few, many = (run_ranks(step, num_ranks, strategy, num_ranks, number) for number in (FEW, MANY))
    block = (many - few) / (MANY - FEW)
    return block, few - FEW * block


def main() -> None:
    """Print the table."""
    rounds = []
    for _ in range(ROUNDS):
        figures = {"plain": _figures(partial(str, "auto"), 1)}
        rounds.append(figures | {name: _figures(strategy, 2) for name, strategy in LAYOUTS.items()})
    table = Table("", "ms per block", "over plain", "by round", "ms of the rest", title=f"{ROUNDS} rounds, 2 processes")
    for name in rounds[0]:
        ratios = [figures[name][0] / figures["plain"][0] for figures in rounds]
        block, rest = (statistics.median(figures[name][i] for figures in rounds) * 1e3 for i in range(2))
        listed = " ".join(f"{ratio:.2f}" for ratio in ratios)
        table.add_row(name, f"{block:.2f}", f"{statistics.median(ratios):.2f}", listed, f"{rest:.1f}")
    Console().print(table)


if __name__ == "__main__":
    main()
