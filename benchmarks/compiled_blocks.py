"""Compiled blocks against eager ones: the time of a step, and of compiling.

    python -m benchmarks.compiled_blocks

The GPT of `examples.gpt` with AdamW, as it is and with dropout after attention and MLP, whose random numbers stay those
of eager code; the first also with each block given to `torch.compile` by hand. All run in this process on one thread
and take turns, a step each. A step is the CPU time of the process, so that what else runs on the machine counts little;
a figure is the median over the turns of the ratio to the step of its peer in the same turn. Compiling begins with
nothing kept of earlier runs. The bar: at most 0.95 of the eager step.

A compiler calls the same matrix products and attention as eager code. So the last line tells which share of an eager
block they take, by torch's profiler: what a compiled one takes at least.
"""

from __future__ import annotations

import os
import statistics
import tempfile

import torch
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.autograd.profiler_util import EventList
from torch.profiler import ProfilerActivity, profile

from benchmarks.models import random_tokens
from benchmarks.turns import ratio_quartiles, take_turns
from examples.gpt import GPT
from lightning_3d.compile.blocks import BlockCompiler
from lightning_3d.config.compile import CompileConfig
from lightning_3d.model.block_runner import running
from lightning_3d.waits import CountedWait

BATCH, LENGTH, VOCABULARY, DROPOUT, WARM_UP, TURNS = 32, 64, 256, 0.1, 3, 40
PAIRS = (("compiled", "eager"), ("compiled, dropout", "eager, dropout"), ("by hand", "eager"))
BAR = 0.95
PRODUCTS = ("aten::mm", "aten::addmm", "aten::bmm", "aten::_scaled_dot_product")


class _Training:
    """A model that is trained step by step."""

    def __init__(self, *, is_compiled: bool = False, by_hand: bool = False, dropout: float = 0.0) -> None:
        torch.manual_seed(0)
        model = GPT(VOCABULARY, LENGTH)
        self.compiling = CountedWait()
        compiler = BlockCompiler(CompileConfig(enabled=True), wait=self.compiling)
        for block in model.blocks:
            if dropout:
                block.attention = nn.Sequential(block.attention, nn.Dropout(dropout))
                block.mlp = nn.Sequential(block.mlp, nn.Dropout(dropout))
            running(block).compiled = compiler.of(block) if is_compiled else None
            if by_hand:
                block.compile(fullgraph=True)
        self._model = model
        self._optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        (self._batch,) = random_tokens(1, BATCH, LENGTH, VOCABULARY)

    def step(self) -> None:
        """Train on one batch."""
        tokens, targets = self._batch
        loss = nn.functional.cross_entropy(self._model(tokens).flatten(0, 1), targets.flatten())
        self._optimizer.zero_grad()
        loss.backward()
        self._optimizer.step()


def _share_of_products() -> float:
    """The share of matrix products and attention in the forward and backward of an eager block."""
    block = GPT(VOCABULARY, LENGTH).blocks[0]
    x = torch.randn(BATCH, LENGTH, block.norm1.normalized_shape[0], requires_grad=True)
    block(x).sum().backward()
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        for _ in range(TURNS):
            y = block(x)
            y.backward(torch.ones_like(y))
    events: EventList = profiled.key_averages()
    products = sum(event.self_cpu_time_total for event in events if event.key.startswith(PRODUCTS))
    return float(products / sum(event.self_cpu_time_total for event in events))


def main() -> None:
    """Print the ratios, and what compiling took."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = folder
        trainings = {
            "eager": _Training(),
            "compiled": _Training(is_compiled=True),
            "by hand": _Training(by_hand=True),
            "eager, dropout": _Training(dropout=DROPOUT),
            "compiled, dropout": _Training(is_compiled=True, dropout=DROPOUT),
        }
        steps = {name: training.step for name, training in trainings.items()}
        seconds = take_turns(steps, num_warm_up=WARM_UP, num_turns=TURNS)
    table = Table("", "ms", "of eager", "quartiles", "bar", "compiling, s", title=f"one step, {TURNS} turns")
    for name, peer in PAIRS:
        low, middle, high = ratio_quartiles(seconds[name], seconds[peer])
        is_own = trainings[name].compiling.seconds > 0
        table.add_row(
            name,
            f"{statistics.median(seconds[name]) * 1e3:.1f}",
            f"{middle:.3f}",
            f"{low:.3f} .. {high:.3f}",
            f"{BAR:.2f}" if is_own else "",
            f"{trainings[name].compiling.seconds:.1f}" if is_own else "",
        )
    console = Console()
    console.print(table)
    console.print(f"matrix products and attention of an eager block: {_share_of_products():.3f} of its time")


if __name__ == "__main__":
    main()
