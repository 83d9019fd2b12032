"""Where an example runs: in one process, under Lightning's DDP, or in a layout of this strategy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import lightning as L
import torch
from torch import Tensor

from lightning_3d import ThreeDStrategy
from tests.examples.data import SEED
from tests.parity import QUIET, Layout, whole_state

LAYOUTS = {"dp 2": Layout(dp=2), "pp 2": Layout(pp=2), "tp 2": Layout(tp=2)}
"""By the name of their column in the documentation's table."""

ONE_PROCESS, DDP = "one process", "ddp"
REFERENCES = {"dp 2": DDP, "pp 2": ONE_PROCESS, "tp 2": ONE_PROCESS}
"""Layout -> what it is to equal, rank by rank: replicas have batches of their own, and batch norms normalise those."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What one rank saw of a run."""

    losses: list[Tensor]
    """That `training_step` returned, if it did."""
    metrics: dict[str, Tensor]
    """`trainer.callback_metrics` at the end."""
    weights: dict[str, Tensor]
    """The module's whole `state_dict`."""
    seen: Any
    """What the program returned besides its trainer: tensors and numbers, nested."""


@dataclass(frozen=True, kw_only=True)
class Place:
    """Makes Trainers for one way to run."""

    name: str
    """Of `LAYOUTS`, or `ONE_PROCESS` or `DDP`."""
    ddp: str = "ddp"
    """The name of DDP's strategy."""

    @property
    def devices(self) -> int:
        return 1 if self.name == ONE_PROCESS else 2

    def strategy(self) -> dict[str, Any] | str:
        """As a configuration file has it."""
        layout = LAYOUTS.get(self.name)
        if layout is None:
            return "auto" if self.name == ONE_PROCESS else self.ddp
        arguments = {
            "pipeline_parallel_size": layout.pp,
            "tensor_parallel_size": layout.tp,
            "save_distributed_checkpoint": False,
        }
        return {"class_path": "lightning_3d.ThreeDStrategy", "init_args": arguments}

    def settings(self) -> dict[str, Any]:
        """Of the Trainer, but for the strategy."""
        return {**QUIET, "devices": self.devices, "enable_checkpointing": False}

    def trainer(self, callbacks: Sequence[L.Callback] = (), **settings: Any) -> L.Trainer:
        """A Trainer as a script would make it, after seeding everything."""
        L.seed_everything(SEED, verbose=False)
        strategy = self.strategy()
        made = strategy if isinstance(strategy, str) else ThreeDStrategy(**strategy["init_args"])
        return L.Trainer(strategy=made, callbacks=[Losses(), *callbacks], **{**self.settings(), **settings})

    def defaults(self, callbacks: Sequence[L.Callback] = (), **settings: Any) -> dict[str, Any]:
        """Of LightningCLI's Trainer."""
        return {**self.settings(), "strategy": self.strategy(), "callbacks": [Losses(), *callbacks], **settings}


class Losses(L.Callback):
    """Keeps what steps return."""

    def __init__(self) -> None:
        self.values: list[Tensor] = []

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: object, batch_idx: int
    ) -> None:
        if outputs:
            self.values.append(outputs["loss"].detach().clone())


def outcome(trainer: L.Trainer, seen: Any) -> Outcome:
    """Gather what a program did; every rank calls it."""
    (losses,) = (callback for callback in trainer.callbacks if isinstance(callback, Losses))
    return Outcome(
        losses=losses.values,
        metrics={name: torch.as_tensor(value).clone() for name, value in trainer.callback_metrics.items()},
        weights=whole_state(trainer),
        seen=seen,
    )
