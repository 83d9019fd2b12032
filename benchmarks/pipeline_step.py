"""Step time of the ghost front end against the same model split by hand on torch.distributed.pipelining.

    python -m benchmarks.pipeline_step

Two processes, two stages, 1F1B, AdamW. Steps of the two alternate in the same processes, so that noise hits both; the
Trainer's own work around a step counts against lightning_3d. The bar is a ratio of 1.03.
"""

from __future__ import annotations

import statistics
import time
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

from benchmarks.launch import run_ranks
from benchmarks.models import GPT, random_tokens
from benchmarks.quiet_trainer import quiet_trainer
from lightning_3d import ThreeDStrategy

BATCH, LENGTH, MICROBATCHES, WARM_UP, STEPS = 8, 128, 4, 5, 100


class ByHand:
    """The same GPT cut in two by hand."""

    def __init__(self) -> None:
        model, rank = GPT(), dist.get_rank()  # of all, as it is asked for before the fit; in hooks it is the replica's
        self._is_first = rank == 0
        half = len(model.blocks) // 2
        first = nn.Sequential(model.tokens, *model.blocks[:half])
        last = nn.Sequential(*model.blocks[half:], model.norm, model.head)
        self.module = (first, last)[rank]
        stage = PipelineStage(self.module, rank, 2, torch.device("cpu"))
        self.schedule = Schedule1F1B(stage, MICROBATCHES, loss_fn=next_token_loss)
        self.optimizer = torch.optim.AdamW(self.module.parameters(), lr=1e-3)

    def step(self, tokens: Tensor, targets: Tensor) -> None:
        self.optimizer.zero_grad()
        if self._is_first:
            self.schedule.step(tokens)
        else:
            self.schedule.step(target=targets)
        self.optimizer.step()


def next_token_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """The loss of `GPT.training_step`, of logits (B, T, V) and targets (B, T)."""
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


class Alternate(L.Callback):
    """Times every step of the Trainer, and after it one by hand on the same batch."""

    def __init__(self) -> None:
        self.by_hand = ByHand()
        self.pairs: list[tuple[float, float]] = []
        self._start = 0.0

    def on_train_batch_start(self, *args: Any) -> None:
        dist.barrier()
        self._start = time.perf_counter()

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        dist.barrier()
        ours, start = time.perf_counter() - self._start, time.perf_counter()
        self.by_hand.step(*batch)
        dist.barrier()
        self.pairs.append((ours, time.perf_counter() - start))


def measure() -> list[tuple[float, float]]:
    """Seconds of (lightning_3d, by hand) for every pair of steps."""
    alternate = Alternate()
    trainer = quiet_trainer(
        ThreeDStrategy(pipeline_parallel_size=2, pipeline={"num_microbatches": MICROBATCHES}),
        2,
        WARM_UP + STEPS,
        alternate,
    )
    trainer.fit(GPT(), random_tokens(WARM_UP + STEPS, BATCH, LENGTH))
    return alternate.pairs[WARM_UP:]


def main() -> None:
    """Print the table."""
    pairs = run_ranks(measure, 2)
    ours, by_hand = (statistics.median(times) for times in zip(*pairs, strict=True))
    table = Table("", "median ms", title=f"one step, 2 stages, 1F1B, {MICROBATCHES} microbatches, {len(pairs)} pairs")
    table.add_row("split by hand", f"{by_hand * 1e3:.1f}")
    table.add_row("lightning_3d", f"{ours * 1e3:.1f}")
    table.add_row("ratio of the medians", f"{ours / by_hand:.3f}")
    table.add_row("median of the ratios", f"{statistics.median(a / b for a, b in pairs):.3f}")
    Console().print(table)


if __name__ == "__main__":
    main()
