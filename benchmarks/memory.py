"""The peak of every rank's memory, predicted against measured, by schedule and by recomputation.

    python -m benchmarks.memory

The GPT of `benchmarks.models` and a Llama of `transformers` with random weights, on 1, 2 and 4 pipeline ranks. Measured
is what torch's allocator of the CPU has handed out at once, at most, in the second step. The bar: within 10 %.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import lightning as L
import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.launch import run_ranks
from benchmarks.models import GPT, random_tokens
from benchmarks.quiet_trainer import quiet_trainer
from lightning_3d import ThreeDStrategy
from lightning_3d.callbacks.memory import MemoryTable

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


def peaks(model: str, pp: int, schedule: str, recompute: str) -> list[tuple[int, int]]:
    """Predicted and measured bytes of each pipeline rank; runs on one of the ranks."""
    torch.manual_seed(0)
    pipeline = {"schedule": schedule, "num_microbatches": 2 * pp} if pp > 1 else {}
    strategy = ThreeDStrategy(
        pipeline_parallel_size=pp, pipeline=pipeline, activations={"recompute": recompute, "budget": 1000}
    )
    trainer = quiet_trainer(strategy, pp, 3, MemoryTable())
    trainer.fit(MODELS[model](), random_tokens(3, BATCH, LENGTH, VOCABULARY))
    return [(row.peak, row.measured or 0) for row in strategy.plan.memory]


def main(models: Sequence[str] = tuple(MODELS)) -> None:
    """Print the table."""
    table = Table("model", "pp", "schedule", "recompute", "predicted MiB", "measured MiB", "ratio", "bar")
    worst = 0.0
    for model in models:
        for pp in (1, 2, 4):
            for schedule in SCHEDULES if pp > 1 else ("",):
                for recompute in ("none", "full") if pp > 1 else ("none", "selective", "full"):
                    rows: Any = run_ranks(peaks, pp, model, pp, schedule, recompute)
                    ratios = [predicted / measured for predicted, measured in rows]
                    worst = max(worst, *(abs(ratio - 1) for ratio in ratios))
                    columns = [" ".join(f"{value[i] / 2**20:.0f}" for value in rows) for i in (0, 1)]
                    text = " ".join(f"{ratio:.3f}" for ratio in ratios)
                    table.add_row(model, str(pp), schedule, recompute, *columns, text, f"{1 - BAR:.2f}..{1 + BAR:.2f}")
    Console(width=160).print(table)
    Console().print(f"greatest difference: {worst:.1%}")


if __name__ == "__main__":
    main(sys.argv[1:] or tuple(MODELS))
