"""Budgets of memory from nothing recomputed to everything: the peak of a rank against the time of a step.

    python -m benchmarks.budget_sweep [PICTURE]

The GPT of `benchmarks.models` in one process, `activations.recompute=auto`, with budgets between the predicted peaks
without recomputation and with all of it. The peak is what torch's allocator of the CPU has handed out at once, at most,
in a step of the Trainer. For the time, models with the same blocks recomputed take turns, a step each (`turns`). With
less memory a step takes longer: both are to be monotone.
"""

from __future__ import annotations

import statistics
import sys
from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table
from torch import nn

from benchmarks.launch import run_ranks
from benchmarks.measured_memory import MeasuredPeak
from benchmarks.models import GPT, random_tokens
from benchmarks.quiet_trainer import quiet_trainer
from benchmarks.turns import ratio_quartiles, take_turns
from lightning_3d import ThreeDStrategy
from lightning_3d.activations.recomputation import Recomputation
from lightning_3d.distributed.rng import Generators

BATCH, LENGTH, POINTS, WARM_UP, TURNS = 8, 256, 7, 2, 15


def planned(activations: Mapping[str, Any]) -> tuple[int, int, dict[str, str]]:
    """Predicted and measured bytes of a step, and how blocks are recomputed; runs on the one rank."""
    torch.manual_seed(0)
    strategy = ThreeDStrategy(activations=activations)
    measured = MeasuredPeak()
    quiet_trainer(strategy, 1, 3, measured).fit(GPT(), random_tokens(3, BATCH, LENGTH))
    (row,) = strategy.plan.memory
    modes: dict[str, str] = {block.fqn: block.recompute for block in strategy.plan.blocks if block.is_recomputed}
    return row.peak, measured.peak, modes


def step_of(modes: Mapping[str, Any]) -> Callable[[], None]:
    """A step of a model with some blocks recomputed: FQN -> how."""
    torch.manual_seed(0)
    model, generators = GPT(), Generators(torch.device("cpu"))
    for fqn, mode in modes.items():
        block = model.get_submodule(fqn)
        recomputation = Recomputation(fqn, block, mode, generators)
        block.forward = partial(_again, recomputation, block.forward)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    (batch,) = random_tokens(1, BATCH, LENGTH)

    def step() -> None:
        tokens, targets = batch
        loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    return step


def _again(recomputation: Recomputation, forward: Callable[..., Any], *args: Any) -> Any:
    return recomputation(forward, args, {})


def main(picture: Path = Path("budget_sweep.png")) -> None:
    """Print the table and draw the picture."""
    most, least = (run_ranks(planned, 1, {"recompute": mode, "budget": 1000})[0] for mode in ("none", "full"))
    budgets = [(least + (most - least) * i / (POINTS - 1)) * 1.001 / 2**30 for i in reversed(range(POINTS))]
    plans = {
        f"{budget * 1024:.0f} MiB": run_ranks(planned, 1, {"recompute": "auto", "budget": budget}) for budget in budgets
    }
    torch.set_num_threads(1)
    steps = {name: step_of(modes) for name, (_, _, modes) in plans.items()}
    seconds = take_turns(steps, num_warm_up=WARM_UP, num_turns=TURNS)
    first = next(iter(plans))
    times = {name: ratio_quartiles(own, seconds[first])[1] for name, own in seconds.items()}
    table = Table("budget", "recomputed", "predicted MiB", "measured MiB", "ms", "of nothing recomputed")
    for name, (predicted, measured, modes) in plans.items():
        counted = ", ".join(f"{num} {mode}" for mode, num in sorted(Counter(modes.values()).items())) or "nothing"
        sizes = [f"{size / 2**20:.1f}" for size in (predicted, measured)]
        table.add_row(name, counted, *sizes, f"{statistics.median(seconds[name]) * 1e3:.0f}", f"{times[name]:.3f}")
    Console(width=120).print(table)
    figure = Figure(figsize=(7, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    axes.plot([measured / 2**20 for _, measured, _ in plans.values()], list(times.values()), marker="o")
    axes.set(xlabel="peak of a rank (MiB)", ylabel="time of a step, 1 with nothing recomputed", title="memory budgets")
    figure.savefig(picture, dpi=120)


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
