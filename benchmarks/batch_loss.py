"""What it costs to make a batch's loss out of its microbatches' right: at the first step, in each step, in memory.

    python -m benchmarks.batch_loss

Two processes, two stages, four microbatches of the benchmarks' GPT.

    mean by samples    pipeline.loss=mean, 1F1B: nothing is found out
    weighted           auto: cross entropy may ignore labels, so that each step counts them; bar 1.01
    masked             auto: valid positions are picked by a mask, which counts as whole; bar 1.02 of gpipe
    gpipe              pipeline.loss=mean with all forwards first
    whole              pipeline.loss=whole; bar 1.02 of gpipe
"""

from __future__ import annotations

import resource
import statistics
import time
from typing import Any

import lightning as L
import torch.distributed as dist
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import Tensor

from benchmarks.launch import run_ranks
from benchmarks.models import GPT, random_tokens
from benchmarks.quiet_trainer import quiet_trainer
from lightning_3d import ThreeDStrategy

BATCH, LENGTH, WARM_UP, STEPS, ROUNDS = 8, 128, 3, 30, 3


class Masked(GPT):
    """Picks the valid positions by a mask."""

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        logits, targets = self(batch[0]).flatten(0, 1), batch[1].flatten()
        return F.cross_entropy(logits, targets, reduction="none")[targets >= 0].mean()


CONTENDERS: dict[str, tuple[type[GPT], dict[str, Any]]] = {
    "mean by samples": (GPT, {"loss": "mean"}),
    "weighted": (GPT, {}),
    "masked": (Masked, {}),
    "gpipe": (GPT, {"loss": "mean", "schedule": "gpipe"}),
    "whole": (GPT, {"loss": "whole", "schedule": "gpipe"}),
}
PEERS = {"weighted": "mean by samples", "masked": "gpipe", "whole": "gpipe"}


class _Clock(L.Callback):
    """Times every step on all ranks."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self._start = 0.0

    def on_train_batch_start(self, *args: Any) -> None:
        dist.barrier()
        self._start = time.perf_counter()

    def on_train_batch_end(self, *args: Any) -> None:
        dist.barrier()
        self.seconds.append(time.perf_counter() - self._start)


def measure(name: str) -> tuple[float, float, float]:
    """Seconds of the first step and of a later one, and the largest peak MiB of a process."""
    model, pipeline = CONTENDERS[name]
    clock = _Clock()
    trainer = quiet_trainer(
        ThreeDStrategy(pipeline_parallel_size=2, pipeline={"num_microbatches": 4, **pipeline}),
        2,
        WARM_UP + STEPS,
        clock,
    )
    trainer.fit(model(), random_tokens(WARM_UP + STEPS, BATCH, LENGTH))
    peaks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(peaks, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)
    return clock.seconds[0], statistics.median(clock.seconds[WARM_UP:]), max(peaks)


def main() -> None:
    """Print the table."""
    rounds = [{name: run_ranks(measure, 2, name) for name in CONTENDERS} for _ in range(ROUNDS)]
    table = Table("", "first step s", "a step ms", "against", "ratio", "by round", "peak MiB")
    for name in CONTENDERS:
        first, step, peak = (statistics.median(of_round[name][i] for of_round in rounds) for i in range(3))
        peer = PEERS.get(name, "")
        ratios = [of_round[name][1] / of_round[peer][1] for of_round in rounds] if peer else []
        ratio = f"{statistics.median(ratios):.3f}" if ratios else ""
        listed = " ".join(f"{r:.2f}" for r in ratios)
        table.add_row(name, f"{first:.2f}", f"{step * 1e3:.0f}", peer, ratio, listed, f"{peak:.0f}")
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
