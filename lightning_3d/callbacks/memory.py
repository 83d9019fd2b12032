"""A callback that prints the memory of the ranks, predicted and measured."""

from __future__ import annotations

from typing import Any

import lightning as L
from lightning.pytorch.profilers import PyTorchProfiler
from rich.console import Console

from lightning_3d.errors import ConfigError, StepError
from lightning_3d.memory.rank_memory import memory_table
from lightning_3d.strategy import ThreeDStrategy


class MemoryTable(L.Callback):
    """Prints, after the second step, the peak of every rank's memory as predicted and as measured.

    On a CPU torch's profiler follows the first two steps.

    Raises:
        StepError: the strategy has no ``activations.budget``.
        ConfigError: a PyTorchProfiler would run at the same time.
    """

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._is_shown = False
        if not isinstance(trainer.strategy, ThreeDStrategy):
            raise StepError("MemoryTable shows the plan of a strategy: set strategy='3d'")
        if isinstance(trainer.profiler, PyTorchProfiler):  # type: ignore[attr-defined]  # set by the Trainer
            raise ConfigError("MemoryTable and PyTorchProfiler both use torch's profiler: leave out one of them")
        trainer.strategy.profile_memory()

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        self._show(trainer)

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._show(trainer)

    def _show(self, trainer: L.Trainer) -> None:
        assert isinstance(trainer.strategy, ThreeDStrategy)
        memory = trainer.strategy.plan.memory
        if not self._is_shown and trainer.is_global_zero and any(row.measured is not None for row in memory):
            self._is_shown = True
            Console(width=120).print(memory_table(memory))
