"""The peak of every rank's memory, predicted against measured, by schedule and by recomputation.

    python -m benchmarks.memory [--sharded] [MODEL ...]

The GPT of `benchmarks.models` and a Llama of `transformers` with random weights, on 1, 2 and 4 pipeline ranks; with
--sharded on 2 ranks of ZeRO and of tensor parallel. Measured is what torch's allocator of the CPU has handed out at
once, at most, in the second step. The bar: within 10 %.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from typing import Any

import lightning as L
import torch
from rich.console import Console
from rich.live import Live
from rich.table import Table
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.launch import run_ranks
from benchmarks.measured_memory import MeasuredPeak
from benchmarks.models import GPT, random_tokens
from benchmarks.quiet_trainer import quiet_trainer
from lightning_3d import ThreeDStrategy

BATCH, LENGTH, VOCABULARY, LAYERS, BAR = 16, 256, 512, 8, 0.10
SCHEDULES = ("1f1b", "gpipe", "interleaved", "interleaved_zero_bubble", "zbv")


class Llama(L.LightningModule):
    """A Llama with random weights; a batch is (tokens, targets)."""

    def __init__(self) -> None:
        super().__init__()
        self.model = LlamaForCausalLM(
            LlamaConfig(
                vocab_size=VOCABULARY,
                hidden_size=256,
                intermediate_size=688,
                num_hidden_layers=LAYERS,
                num_attention_heads=8,
                num_key_value_heads=4,
                use_cache=False,
            )
        )

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        return self.model(input_ids=batch[0], labels=batch[0]).loss  # type: ignore[no-any-return]

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


MODELS = {"GPT": lambda: GPT(vocabulary=VOCABULARY, num_layers=LAYERS), "Llama": Llama}


def layouts(sharded: bool) -> Iterator[tuple[str, int, dict[str, Any]]]:
    """Name, number of ranks, and arguments of the strategy."""
    if sharded:
        yield from ((f"dp 2, ZeRO {stage}", 2, {"zero": {"stage": stage}}) for stage in range(4))
        yield "tp 2", 2, {"tensor_parallel_size": 2}
        yield "tp 2, sequence parallel", 2, {"tensor_parallel_size": 2, "tensor": {"sequence_parallel": True}}
        return
    yield "one rank", 1, {}
    for pp in (2, 4):
        for schedule in SCHEDULES:
            pipeline = {"schedule": schedule, "num_microbatches": 2 * pp}
            yield f"pp {pp}, {schedule}", pp, {"pipeline_parallel_size": pp, "pipeline": pipeline}


def peaks(model: str, num_ranks: int, arguments: dict[str, Any], recompute: str) -> list[tuple[int, int]]:
    """Predicted and measured bytes of each pipeline rank; runs on one of the ranks."""
    torch.manual_seed(0)
    strategy = ThreeDStrategy(activations={"recompute": recompute, "budget": 1000}, **arguments)
    measured = MeasuredPeak()
    trainer = quiet_trainer(strategy, num_ranks, 3, measured)
    # Replicas share the samples: enough for three steps of two.
    trainer.fit(MODELS[model](), random_tokens(6, BATCH, LENGTH, VOCABULARY))
    everyone: list[tuple[int, int]] = [(0, 0)] * num_ranks
    torch.distributed.all_gather_object(everyone, (strategy.mesh.pp_rank, measured.peak))
    most = {pp_rank: peak for pp_rank, peak in sorted(everyone)}  # of the replicas
    return [(row.peak, most[pp_rank]) for pp_rank, row in enumerate(strategy.plan.memory)]


def main(sharded: bool, models: Sequence[str]) -> None:
    """Print the table, a row as soon as it is measured."""
    table = Table("model", "layout", "recompute", "predicted MiB", "measured MiB", "ratio")
    ratios: list[float] = []
    with Live(table, console=Console(width=160), auto_refresh=False) as live:
        for model in models:
            for name, num_ranks, arguments in layouts(sharded):
                modes = ("none", "full") if "pp" in name else ("none", "selective", "full")
                for recompute in modes:
                    rows: Any = run_ranks(peaks, num_ranks, model, num_ranks, arguments, recompute)
                    own = [predicted / measured for predicted, measured in rows]
                    ratios += own
                    columns = [" ".join(f"{value[i] / 2**20:.0f}" for value in rows) for i in (0, 1)]
                    table.add_row(model, name, recompute, *columns, " ".join(f"{ratio:.3f}" for ratio in own))
                    live.refresh()
    print(f"\nratios {min(ratios):.3f} to {max(ratios):.3f}; bar {1 - BAR:.2f} to {1 + BAR:.2f}")


if __name__ == "__main__":
    main("--sharded" in sys.argv, [name for name in sys.argv[1:] if name in MODELS] or tuple(MODELS))
