"""Peak memory and time of a step whose sequence is cut over ranks, against the same step on one process.

    python -m benchmarks.context_step [RANKS [LENGTH]]

A Llama of `transformers` with random weights in fp32, 4 layers of width 256 and 8 heads, and one sequence of 4096
tokens on 2 ranks unless other numbers are given. The peak is what torch's allocator has handed out at once in a step,
above weights, gradients and what the optimizer keeps. Time is CPU time of the slowest rank, as ranks share the cores of
one machine. In theory both are 1 / RANKS; the bar for memory is 0.04 above that.

By hand: the same model under Lightning's DDP, whose step cuts tokens, positions and targets, and whose attention sends
heads by all-to-alls, as DeepSpeed-Ulysses does. The bar for time is 1.05 of that.
"""

from __future__ import annotations

import sys
import time
from functools import partial
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from transformers import AttentionInterface

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


class _Swapped(torch.autograd.Function):
    """Shards of one dim become shards of another."""

    @staticmethod
    def forward(ctx: Any, own: Tensor, cut: int, whole: int) -> Tensor:
        ctx.dims = whole, cut
        sent = [piece.contiguous() for piece in own.chunk(dist.get_world_size(), cut)]
        came = [torch.empty_like(piece) for piece in sent]
        dist.all_to_all(came, sent)
        return torch.cat(came, whole)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return _Swapped.apply(gradient, *ctx.dims), None, None  # type: ignore[no-untyped-call]


def _by_heads(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: None, scaling: float, **_: object
) -> tuple[Tensor, None]:
    """Attention of (B, heads, T / ranks, D)."""
    q, k, v = (_Swapped.apply(tensor, 1, 2) for tensor in (query, key, value))  # type: ignore[no-untyped-call]
    given = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scaling)
    return _Swapped.apply(given, 2, 1).transpose(1, 2), None  # type: ignore[no-untyped-call]


class ByHand(Llama):
    """The same on own slices."""

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        rank, size, tokens = dist.get_rank(), dist.get_world_size(), batch[0]
        own = slice(rank * tokens.shape[1] // size, (rank + 1) * tokens.shape[1] // size)
        positions, targets = torch.arange(tokens.shape[1])[None], F.pad(tokens[:, 1:], (0, 1), value=-100)
        logits = self.model(input_ids=tokens[:, own], position_ids=positions[:, own]).logits
        lost = F.cross_entropy(logits.flatten(0, 1), targets[:, own].flatten(), reduction="sum")
        return lost * size / (tokens.shape[1] - 1)


def run(length: int, *, by_hand: bool = False) -> list[tuple[float, int]]:
    """Train; the seconds of a step and the peak in bytes of each rank."""
    num_ranks, measured = dist.get_world_size(), Measured()
    L.seed_everything(1, verbose=False)
    AttentionInterface.register("by_heads", _by_heads)
    config = {**CONFIG, "max_position_embeddings": length}
    model = ByHand({**config, "attn_implementation": "by_heads"}) if by_hand else Llama(config)
    strategy = "ddp" if by_hand else ThreeDStrategy(context_parallel_size=num_ranks) if num_ranks > 1 else "auto"
    trainer = quiet_trainer(strategy, num_ranks, STEPS, measured, use_distributed_sampler=not by_hand)
    trainer.fit(model, random_tokens(STEPS, 1, length, CONFIG["vocab_size"]))
    everyone: list[Any] = [None] * num_ranks
    dist.all_gather_object(everyone, (min(measured.seconds[2:-1]), measured.peak))
    return everyone


def main(num_ranks: int = 2, length: int = 4096) -> None:
    """Print the table."""
    ((alone, peak),), ranks = run_ranks(run, 1, length), run_ranks(run, num_ranks, length)
    hands = run_ranks(partial(run, by_hand=True), num_ranks, length)
    table = Table(title=f"a step on {num_ranks} ranks, {length} tokens")
    for column in ("", "one process", "a rank", "ratio", "by hand", "ratio"):
        table.add_column(column)
    seconds, most = (max(each) for each in zip(*ranks, strict=True))
    of_hand, peak_of_hand = (max(each) for each in zip(*hands, strict=True))
    row = [f"{number / 2**20:.0f}" for number in (peak, most, peak_of_hand)]
    table.add_row("peak, MiB", *row[:2], f"{most / peak:.3f}", row[2], f"{most / peak_of_hand:.3f}")
    row = [f"{number:.2f}" for number in (alone, seconds, of_hand)]
    table.add_row("CPU s", *row[:2], f"{seconds / alone:.3f}", row[2], f"{seconds / of_hand:.3f}")
    Console().print(table)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
