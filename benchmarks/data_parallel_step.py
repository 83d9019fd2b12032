"""Step time of every ZeRO stage against raw DDP, Lightning's DDP and raw FSDP2.

    python -m benchmarks.data_parallel_step

Two processes, the GPT of `benchmarks.models` with a vocabulary of 8192, AdamW. In every round each contender trains for
some steps, in turn; a figure is the median over the rounds of the ratio of its median step to its peer's in the same
round. A step is the time from one batch to the next, so the Trainer's own work counts. The bars:
stage 0 at most 1.03 of raw DDP and 0.97 of Lightning's DDP, stage 1 at most 1.05 of raw DDP, stage 3 at most 1.03 of
raw FSDP2.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any

import lightning as L
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from benchmarks.models import GPT, random_tokens
from benchmarks.quiet_trainer import quiet_trainer
from benchmarks.rounds import Contenders, compare
from lightning_3d import ThreeDStrategy

RANKS, BATCH, LENGTH, VOCABULARY, WARM_UP, STEPS, ROUNDS = 2, 8, 128, 8192, 3, 8, 3
BARS = (
    ("stage 0", "raw DDP", 1.03),
    ("stage 0", "Lightning DDP", 0.97),
    ("stage 1", "raw DDP", 1.05),
    ("stage 2", "raw DDP", None),
    ("stage 3", "raw FSDP2", 1.03),
    ("Lightning DDP", "raw DDP", None),
    ("raw FSDP2", "raw DDP", None),
)


class Clock(L.Callback):
    """Times steps from one batch to the next.

    Args:
        num_warm_up: Steps that do not count.
    """

    def __init__(self, num_warm_up: int) -> None:
        self._num_warm_up = num_warm_up
        self._starts: list[float] = []

    def tick(self) -> None:
        """A batch has come."""
        self._starts.append(time.perf_counter())

    @property
    def num_batches(self) -> int:
        """Batches that have come so far."""
        return len(self._starts)

    def on_train_batch_start(self, *args: Any) -> None:
        """As Lightning calls it."""
        self.tick()

    def seconds(self) -> float:
        """The median step."""
        starts = self._starts[self._num_warm_up :]
        return statistics.median(end - start for start, end in pairwise(starts))


def train(strategy: Any, num_ranks: int, model: GPT, batches: DataLoader[Any], num_warm_up: int) -> float:
    """Seconds of a step of a Trainer."""
    clock = Clock(num_warm_up)
    trainer = quiet_trainer(strategy, num_ranks, len(batches), clock, use_distributed_sampler=False)
    trainer.fit(model, batches)
    return clock.seconds()


def _batches() -> DataLoader[Any]:
    return random_tokens(WARM_UP + STEPS, BATCH, LENGTH, VOCABULARY)


def _lightning(strategy: Any) -> float:
    return train(strategy, RANKS, GPT(VOCABULARY), _batches(), WARM_UP)


def _ours(stage: int) -> float:
    return _lightning(ThreeDStrategy(zero={"stage": stage}))


class _Forward(nn.Module):
    """A forward that is the training step, for wrappers that run nothing else."""

    def __init__(self, model: GPT) -> None:
        super().__init__()
        self.model = model

    def forward(self, batch: Any) -> torch.Tensor:
        return self.model.training_step(batch, 0)


def _raw(wrap: Callable[[_Forward], nn.Module]) -> float:
    torch.manual_seed(0)
    model, clock = wrap(_Forward(GPT(VOCABULARY))), Clock(WARM_UP)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for batch in _batches():
        clock.tick()
        loss = model(batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        loss.item()
    return clock.seconds()


def _fsdp(model: _Forward) -> nn.Module:
    for block in model.model.blocks:
        fully_shard(block)
    fully_shard(model)
    return model


CONTENDERS: Contenders = {
    "raw DDP": partial(_raw, DistributedDataParallel),
    "stage 0": partial(_ours, 0),
    "stage 1": partial(_ours, 1),
    "Lightning DDP": partial(_lightning, "ddp"),
    "stage 2": partial(_ours, 2),
    "raw FSDP2": partial(_raw, _fsdp),
    "stage 3": partial(_ours, 3),
}


def main() -> None:
    """Print the table."""
    compare(CONTENDERS, BARS, num_ranks=RANKS, num_rounds=ROUNDS, title=f"{RANKS} processes")


if __name__ == "__main__":
    main()
