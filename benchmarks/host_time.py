"""CPU time of Python per block, per step and per microbatch by layout, as ratios over a plain Trainer; and its calls.

    python -m benchmarks.host_time

A GPU computes while Python runs ahead: Python's time matters where it is longer. Here tensors are tiny, so that next to
nothing else takes time. Each rank trains a GPT of 2 and one of 8 blocks: the difference of their steps is the time of
six blocks. Layouts take turns in rounds; a figure is the median over the rounds of the ratio to plain in the same
round. Time is that of the threads that call Python (`time.thread_time`), from batch to batch: forward, backward,
optimizer and Lightning's loop. PyTorch runs the backward in the same thread on CPUs; on GPUs it has threads of its own.

Functions that a step of the larger model calls are counted in a run of its own, by Python's profiler. They are nearly
the same in each run, however busy the machine is, so that they tell what a change has added.
"""

from __future__ import annotations

import cProfile
import logging
import statistics
import time
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.launch import run_ranks
from benchmarks.models import GPT, random_tokens
from benchmarks.quiet_trainer import quiet_trainer
from lightning_3d import ThreeDStrategy

BATCH, LENGTH, VOCABULARY, WIDTH, FEW, MANY, WARM_UP, STEPS, ROUNDS = 8, 8, 32, 32, 2, 8, 8, 16, 3


class Clock:
    """A data loader that notes the CPU time of the thread that trains at each batch, or counts calls between them.

    No callback: one that sees ends of batches may look at gradients, which ZeRO would then gather for it.
    """

    def __init__(self, *, counts: bool = False) -> None:
        self._batches = random_tokens(WARM_UP + STEPS, BATCH, LENGTH, VOCABULARY)
        self._times: list[float] = []
        self._profile = cProfile.Profile() if counts else None

    def __len__(self) -> int:
        return WARM_UP + STEPS

    def __iter__(self) -> Iterator[Any]:
        for batch in self._batches:
            self._times.append(time.thread_time())
            if self._profile is not None and len(self._times) == WARM_UP:
                self._profile.enable()
            if self._profile is not None and len(self._times) == WARM_UP + STEPS:
                self._profile.disable()
            yield batch

    @property
    def seconds_of_step(self) -> float:
        """The lower quartile, as other programs only ever add to it."""
        seconds = [end - start for start, end in zip(self._times[WARM_UP:], self._times[WARM_UP + 1 :], strict=False)]
        return statistics.quantiles(seconds, n=4)[0]

    @property
    def calls_of_step(self) -> float:
        """On average."""
        assert self._profile is not None
        return sum(entry.callcount for entry in self._profile.getstats()) / STEPS


def measure(strategy: Callable[[], Any], num_ranks: int) -> tuple[float, float]:
    """Seconds per block and seconds of the rest of a step, on this rank."""
    few, many = (_trained(strategy, num_ranks, number, Clock()).seconds_of_step for number in (FEW, MANY))
    block = (many - few) / (MANY - FEW)
    return block, few - FEW * block


def count(strategy: Callable[[], Any], num_ranks: int) -> float:
    """Calls of a step, on this rank."""
    return _trained(strategy, num_ranks, MANY, Clock(counts=True)).calls_of_step


def _trained(strategy: Callable[[], Any], num_ranks: int, num_blocks: int, clock: Clock) -> Clock:
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    logging.getLogger("lightning_3d").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    trainer = quiet_trainer(strategy(), num_ranks, WARM_UP + STEPS)
    trainer.fit(GPT(VOCABULARY, width=WIDTH, num_layers=num_blocks), clock)
    return clock


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
    "pp 2, inline": _ours(pipeline_parallel_size=2, pipeline={"mode": "inline"}),
}


def main() -> None:
    """Print the table."""
    rounds = []
    for _ in range(ROUNDS):
        figures = {"plain": run_ranks(measure, 1, partial(str, "auto"), 1)}
        rounds.append(figures | {name: run_ranks(measure, 2, strategy, 2) for name, strategy in LAYOUTS.items()})
    calls = {"plain": run_ranks(count, 1, partial(str, "auto"), 1)}
    calls |= {name: run_ranks(count, 2, strategy, 2) for name, strategy in LAYOUTS.items()}
    headers = ("", "ms per block", "over plain", "by round", "ms of the rest", "calls")
    table = Table(*headers, title=f"{ROUNDS} rounds, 2 processes")
    for name in rounds[0]:
        ratios = [figures[name][0] / figures["plain"][0] for figures in rounds]
        block, rest = (statistics.median(figures[name][i] for figures in rounds) * 1e3 for i in range(2))
        listed = " ".join(f"{ratio:.2f}" for ratio in ratios)
        table.add_row(
            name, f"{block:.2f}", f"{statistics.median(ratios):.2f}", listed, f"{rest:.1f}", f"{calls[name]:,.0f}"
        )
    Console().print(table)


if __name__ == "__main__":
    main()
