"""Time that tensor parallel adds to the start of training: planning, and the proof on all distinct blocks.

    python -m benchmarks.tensor_planning

48 blocks of 2 classes on 2 processes. The bar for both together is 10 s.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import lightning as L
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from benchmarks.launch import run_ranks
from benchmarks.models import GPT, Block, random_tokens
from lightning_3d import ThreeDStrategy
from lightning_3d.planning import planner
from lightning_3d.planning.plan import Plan
from lightning_3d.trainer import parallel_model

NUM_BLOCKS, WIDTH, HEADS = 48, 256, 8


class GatedBlock(Block):
    """A block with a gated MLP."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__(width, num_heads)
        self.gate = nn.Linear(width, 4 * width)

    def mlp(self, h: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(h)) * self.up(h))  # type: ignore[no-any-return]


class Alternating(GPT):
    """A GPT whose blocks are of two classes in turn."""

    def __init__(self) -> None:
        super().__init__(width=WIDTH, num_layers=0)
        classes = (Block, GatedBlock)
        self.blocks = nn.ModuleList(classes[index % 2](WIDTH, HEADS) for index in range(NUM_BLOCKS))


def measure() -> dict[str, float]:
    """Seconds of the planning and of the proof, in a run of one step by the Trainer."""
    seconds: dict[str, float] = {}
    plans: list[Plan] = []

    def timed(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            result = function(*args, **kwargs)
            seconds[name] = seconds.get(name, 0.0) + time.perf_counter() - start
            plans.append(result)
            return result

        return call

    planner.plan_blocks = timed("planning", planner.plan_blocks)
    parallel_model.prove_blocks = timed("proof", parallel_model.prove_blocks)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=ThreeDStrategy(tensor_parallel_size=2),
        max_steps=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Alternating(), random_tokens(1, 4, 64))
    planned = [block for block in plans[-1].blocks if block.fqn.startswith("blocks.")]
    assert sum(block.tensor is not None and block.tensor.is_sharded for block in planned) == NUM_BLOCKS
    return seconds


def main() -> None:
    """Print the table."""
    seconds = run_ranks(measure, 2)
    table = Table("", "", title=f"{NUM_BLOCKS} blocks of 2 classes, 2 processes")
    for name, value in seconds.items():
        table.add_row(name, f"{value:.2f} s")
    table.add_row("both", f"{sum(seconds.values()):.2f} s")
    Console().print(table)


if __name__ == "__main__":
    main()
