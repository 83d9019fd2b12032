"""What `Telemetry` costs: time of a step with it against without it, in one run.

    python -m benchmarks.telemetry [ONE_LAYOUT]

The GPT of `benchmarks.models`. Of one fit, windows of 50 steps have the callback and others have not, in turn. Of 50
steps with it 49 are common ones, and one is measured by phases, after which all ranks exchange a row. Figures are
medians of steps by the clock, over that of steps without it; the last one is of all 50, and its bar is 1.01.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import lightning as L
from rich.console import Console
from rich.table import Table

from benchmarks.launch import run_ranks
from benchmarks.models import GPT, random_tokens
from benchmarks.quiet_trainer import quiet_trainer
from lightning_3d import ThreeDStrategy
from lightning_3d.callbacks import Telemetry

BATCH, LENGTH, WINDOW, PAIRS = 4, 64, 50, 5
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one rank": (1, {}),
    "pp2": (2, {"pipeline_parallel_size": 2, "pipeline": {"num_microbatches": 4}}),
    "dp2, ZeRO 3": (2, {"zero": {"stage": 3}}),
    "tp2": (2, {"tensor_parallel_size": 2}),
}


class Alternating(Telemetry):
    """Is there in every other window."""

    is_on = True


def _switched(name: str) -> Callable[..., None]:
    def hook(self: Alternating, *args: Any) -> None:
        if self.is_on:
            getattr(Telemetry, name)(self, *args)

    return hook


for _name in (
    "on_train_batch_start",
    "on_before_backward",
    "on_after_backward",
    "on_before_optimizer_step",
    "on_train_batch_end",
):
    setattr(Alternating, _name, _switched(_name))


class Windows(L.Callback):
    """Switches the other callback off and on, and times steps, from the end of a batch to that of the next."""

    def __init__(self, telemetry: Alternating) -> None:
        self._telemetry = telemetry
        self._last = 0.0
        self.steps: dict[str, list[float]] = {"common": [], "measured": [], "without": []}

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        """As Lightning calls it."""
        now, (window, step) = time.perf_counter(), divmod(trainer.global_step, WINDOW)
        if window > 0:  # the first one warms up
            kind = ("common" if step else "measured") if self._telemetry.is_on else "without"
            self.steps[kind].append(now - self._last)
        if step == 0:
            self._telemetry.is_on = window % 2 == 0
        self._last = time.perf_counter()


def _measure(num_ranks: int, settings: dict[str, Any]) -> dict[str, float]:
    telemetry = Alternating(WINDOW)
    windows, num_steps = Windows(telemetry), (1 + 2 * PAIRS) * WINDOW
    trainer = quiet_trainer(ThreeDStrategy(**settings), num_ranks, num_steps, telemetry, windows)
    trainer.fit(GPT(), random_tokens(num_steps * num_ranks, BATCH, LENGTH))
    return {kind: statistics.median(seconds) for kind, seconds in windows.steps.items()}


def main(chosen: list[str]) -> None:
    """Print the table."""
    table = Table("", "ms without", "common step", "measured step", f"all {WINDOW}", title="with / without Telemetry")
    for name, (num_ranks, settings) in LAYOUTS.items():
        if not chosen or name in chosen:
            found = run_ranks(_measure, num_ranks, num_ranks, settings)
            without, common, measured = (found[kind] for kind in ("without", "common", "measured"))
            mean = ((WINDOW - 1) * common + measured) / WINDOW
            ratios = [f"{seconds / without:.4f}" for seconds in (common, measured, mean)]
            table.add_row(name, f"{without * 1e3:.1f}", *ratios)
    Console(width=120).print(table)


if __name__ == "__main__":
    main(sys.argv[1:])
