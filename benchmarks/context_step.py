r"""Peak memory and time of a step whose sequence is cut over ranks, against the same step on one process.

    python -m benchmarks.context_step
    python -m benchmarks.context_step --num_ranks 4 --attention ring --order head_tail
    python -m benchmarks.context_step --num_ranks 4 --length 16384 --num_layers 2 --width 64 --num_heads 2 \
        --attention ring

A Llama of `transformers` with random weights in fp32, 4 layers of width 256 and 8 heads, and one sequence of 4096
tokens on 2 ranks unless told otherwise. The peak is what torch's allocator has handed out at once in a step, above
weights, gradients and what the optimizer keeps. Time is CPU time of the slowest rank, as ranks share the cores of one
machine. In theory both are 1 / RANKS; the bar for memory is 0.04 above that. Below it is the CPU time of the rank that
has least: with `--order head_tail` it should be within 0.05 of the slowest one's.

By hand: the same model under Lightning's DDP, whose step cuts tokens, positions and targets. Its attention sends heads
by all-to-alls, as DeepSpeed-Ulysses does, or, beside ``--attention ring`` and ``gather``, gathers keys and values. The
bar for time is 1.05 of that.
"""

from __future__ import annotations

import time
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
import torch.nn.functional as F
from jsonargparse import auto_cli
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
from lightning_3d.config.context import AttentionWay, RowOrder

VOCABULARY, STEPS = 2048, 5


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


class _Gathered(torch.autograd.Function):
    """The slices of all ranks, one after the other along dim 2."""

    @staticmethod
    def forward(ctx: Any, own: Tensor) -> Tensor:
        every = [torch.empty_like(own, memory_format=torch.contiguous_format) for _ in range(dist.get_world_size())]
        dist.all_gather(every, own.contiguous())
        return torch.cat(every, 2)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        parts = [part.contiguous() for part in gradient.chunk(dist.get_world_size(), 2)]
        own = torch.empty_like(parts[0])
        dist.reduce_scatter(own, parts)
        return own


def _to_gathered(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: None, scaling: float, **_: object
) -> tuple[Tensor, None]:
    """Attention of own queries to all keys that are not later."""
    rows = query.shape[2]
    last = (dist.get_rank() + 1) * rows
    k, v = (_Gathered.apply(tensor)[:, :, :last] for tensor in (key, value))  # type: ignore[no-untyped-call]
    earlier = torch.ones(rows, last, dtype=torch.bool).tril(last - rows)
    given = F.scaled_dot_product_attention(query, k, v, attn_mask=earlier, scale=scaling)
    return given.transpose(1, 2), None


class ByHand(Llama):
    """The same on own slices."""

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        rank, size, tokens = dist.get_rank(), dist.get_world_size(), batch[0]
        own = slice(rank * tokens.shape[1] // size, (rank + 1) * tokens.shape[1] // size)
        positions, targets = torch.arange(tokens.shape[1])[None], F.pad(tokens[:, 1:], (0, 1), value=-100)
        logits = self.model(input_ids=tokens[:, own], position_ids=positions[:, own]).logits
        lost = F.cross_entropy(logits.flatten(0, 1), targets[:, own].flatten(), reduction="sum")
        return lost * size / (tokens.shape[1] - 1)


def run(config: dict[str, Any], context: dict[str, str], by_hand: str | None = None) -> list[tuple[float, int]]:
    """Train; the seconds of a step and the peak in bytes of each rank.

    Args:
        config: Of the model.
        context: The strategy's settings of the section.
        by_hand: The attention of the step by hand; None: it is the strategy's.
    """
    num_ranks, length, measured = dist.get_world_size(), config["max_position_embeddings"], Measured()
    L.seed_everything(1, verbose=False)
    AttentionInterface.register("by_heads", _by_heads)
    AttentionInterface.register("to_gathered", _to_gathered)
    model = Llama(config) if by_hand is None else ByHand({**config, "attn_implementation": by_hand})
    strategy: Any = "auto" if by_hand is None else "ddp"
    if num_ranks > 1 and by_hand is None:
        strategy = ThreeDStrategy(context_parallel_size=num_ranks, context=context)
    trainer = quiet_trainer(strategy, num_ranks, STEPS, measured, use_distributed_sampler=by_hand is None)
    trainer.fit(model, random_tokens(STEPS, 1, length, VOCABULARY))
    everyone: list[Any] = [None] * num_ranks
    dist.all_gather_object(everyone, (min(measured.seconds[2:-1]), measured.peak))
    return everyone


def config_of(length: int, num_layers: int = 4, width: int = 256, num_heads: int = 8) -> dict[str, Any]:
    """The configuration of the model; the arguments are those of `main`."""
    return {
        "vocab_size": VOCABULARY,
        "hidden_size": width,
        "num_hidden_layers": num_layers,
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_heads,
        "intermediate_size": width * 43 // 16,
        "max_position_embeddings": length,
    }


def main(
    num_ranks: int = 2,
    length: int = 4096,
    attention: AttentionWay = "auto",
    order: RowOrder = "auto",
    num_layers: int = 4,
    width: int = 256,
    num_heads: int = 8,
) -> None:
    """Print the table.

    Args:
        num_ranks: Over which sequences are cut.
        length: Tokens of the sequence.
        attention: The setting `context.attention`.
        order: The setting `context.order`.
        num_layers: At least 2, as the layers are blocks then.
        width: Of the residual stream.
        num_heads: Of queries, and as many of keys.
    """
    config = config_of(length, num_layers, width, num_heads)
    context = {"attention": attention, "order": order}
    by_hand = "by_heads" if attention in ("auto", "ulysses") else "to_gathered"
    ((alone, peak),) = run_ranks(run, 1, config, context)
    ranks, hands = (run_ranks(run, num_ranks, config, context, way) for way in (None, by_hand))
    table = Table(title=f"a step on {num_ranks} ranks, {length} tokens, attention {attention}, order {order}")
    for column in ("", "one process", "a rank", "ratio", "by hand", "ratio"):
        table.add_column(column)
    seconds, most = (max(each) for each in zip(*ranks, strict=True))
    of_hand, peak_of_hand = (max(each) for each in zip(*hands, strict=True))
    row = [f"{number / 2**20:.0f}" for number in (peak, most, peak_of_hand)]
    table.add_row("peak, MiB", *row[:2], f"{most / peak:.3f}", row[2], f"{most / peak_of_hand:.3f}")
    row = [f"{number:.2f}" for number in (alone, seconds, of_hand)]
    table.add_row("CPU s", *row[:2], f"{seconds / alone:.3f}", row[2], f"{seconds / of_hand:.3f}")
    least, least_of_hand = (min(each)[0] for each in (ranks, hands))
    table.add_row("CPU s, of the least busy rank", "", f"{least:.2f}", "", f"{least_of_hand:.2f}", "")
    table.add_row("least / most", "", f"{least / seconds:.3f}", "", f"{least_of_hand / of_hand:.3f}", "")
    Console().print(table)


if __name__ == "__main__":
    auto_cli(main)
