"""Time of a step in inline mode against the time of the same step on one process and of its broadcasts by themselves.

    python -m benchmarks.inline_step

Two ranks of a pipeline. In theory the forward and backward of a step inline take as long as on one process, as one rank
computes at a time, and the broadcasts of what blocks give and of the gradients of their inputs. The three take turns in
the same processes. Bytes that were sent are counted and compared with that theory; messages that tell of shapes and
random numbers are not counted. The bars are ratios of 1.10 and of 1.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import lightning as L
import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import Tensor

from benchmarks.launch import run_ranks
from benchmarks.models import GPT, random_tokens
from benchmarks.quiet_trainer import quiet_trainer
from lightning_3d import ThreeDStrategy
from lightning_3d.pipeline.inline.exchange import Exchange

BATCH, LENGTH, WARM_UP, STEPS = 8, 128, 5, 60
WIDTH, VOCABULARY, NUM_LAYERS = 256, 512, 8
ACTIVATION = BATCH * LENGTH * WIDTH
LOGITS = BATCH * LENGTH * VOCABULARY
MESSAGES = [ACTIVATION] * (1 + NUM_LAYERS + 1) + [LOGITS] + [ACTIVATION] * (NUM_LAYERS + 2)
"""Elements of each broadcast: forward of embedding, blocks, norm and head; gradients of the inputs of all but the
first."""


class Turns(L.Callback):
    """Times the forward and backward of every step, then those of one process, then the broadcasts."""

    def __init__(self) -> None:
        self.plain: GPT | None = None
        self.seconds: list[tuple[float, float, float]] = []
        self.num_sent = 0
        self._start = self._ours = 0.0
        self._group: dist.ProcessGroup | None = None  # of all ranks, as the default one has this replica's rank alone

    def on_train_start(self, trainer: L.Trainer, *args: Any) -> None:
        assert isinstance(trainer.strategy, ThreeDStrategy)
        self._group = trainer.strategy.mesh.group("pp")
        self.plain = GPT(VOCABULARY, WIDTH, NUM_LAYERS)  # not before: copies of the model are made parallel with it

    def on_train_batch_start(self, *args: Any) -> None:
        dist.barrier(group=self._group)
        self._start = time.perf_counter()

    def on_before_optimizer_step(self, *args: Any) -> None:
        dist.barrier(group=self._group)
        self._ours = time.perf_counter() - self._start

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        assert self.plain is not None
        dist.barrier(group=self._group)
        start = time.perf_counter()
        if trainer.global_rank == 0:
            self.plain.training_step(batch, batch_idx).backward()
            self.plain.zero_grad()
        dist.barrier(group=self._group)
        alone, start = time.perf_counter() - start, time.perf_counter()
        for i, size in enumerate(MESSAGES):
            dist.broadcast(torch.empty(size), i % 2, group=self._group)
        dist.barrier(group=self._group)
        self.seconds.append((self._ours, alone, time.perf_counter() - start))

    @contextmanager
    def counted(self) -> Iterator[None]:
        """Count the bytes of tensors that are exchanged inside."""
        send = Exchange._broadcast

        def counting(exchange: Exchange, tensor: Tensor, home: int) -> None:
            self.num_sent += tensor.nbytes
            send(exchange, tensor, home)

        with mock.patch.object(Exchange, "_broadcast", counting):
            yield


def measure() -> tuple[list[tuple[float, float, float]], float]:
    """Seconds of (inline, one process, broadcasts) by step, and bytes sent per step."""
    turns = Turns()
    strategy = ThreeDStrategy(pipeline_parallel_size=2, pipeline={"mode": "inline"})
    trainer = quiet_trainer(strategy, 2, WARM_UP + STEPS, turns)
    with turns.counted():
        trainer.fit(GPT(VOCABULARY, WIDTH, NUM_LAYERS), random_tokens(WARM_UP + STEPS, BATCH, LENGTH, VOCABULARY))
    return turns.seconds[WARM_UP:], turns.num_sent / (WARM_UP + STEPS)


def main() -> None:
    """Print the table."""
    seconds, num_sent = run_ranks(measure, 2)
    ours, alone, sent = (statistics.median(times) for times in zip(*seconds, strict=True))
    table = Table("", "median ms", title=f"forward and backward of one step, inline on 2 ranks, {len(seconds)} steps")
    table.add_row("one process", f"{alone * 1e3:.1f}")
    table.add_row("broadcasts", f"{sent * 1e3:.1f}")
    table.add_row("inline", f"{ours * 1e3:.1f}")
    table.add_row("median of the ratios", f"{statistics.median(a / (b + c) for a, b, c in seconds):.3f}")
    table.add_row("bytes sent over theory", f"{num_sent / (4 * sum(MESSAGES)):.3f}")
    Console().print(table)


if __name__ == "__main__":
    main()
