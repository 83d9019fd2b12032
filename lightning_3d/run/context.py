"""The objects that all phases of a run go by."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.strategies import ParallelStrategy
from lightning.pytorch.trainer.states import TrainerFn

from lightning_3d.config.settings import ThreeDConfig
from lightning_3d.distributed.mesh import Mesh
from lightning_3d.precision.plugin import ThreeDPrecision
from lightning_3d.ranks.rendezvous import Rendezvous


@dataclass(frozen=True, kw_only=True)
class RunContext:
    """A Trainer and its model, and the ranks that run it."""

    trainer: Trainer
    module: LightningModule
    config: ThreeDConfig
    """The settings in force: those that were given, and the layout that was chosen where they leave it open."""
    mesh: Mesh
    rendezvous: Rendezvous
    precision: ThreeDPrecision
    device: torch.device

    @property
    def strategy(self) -> ParallelStrategy:
        """The Trainer's."""
        assert isinstance(self.trainer.strategy, ParallelStrategy)
        return self.trainer.strategy

    @property
    def is_fit(self) -> bool:
        """Whether the model is trained."""
        return self.trainer.state.fn == TrainerFn.FITTING

    @property
    def is_in_parts(self) -> bool:
        """Whether ranks hold parts of the model."""
        return self.mesh.shape.is_model_parallel or self.config.zero.is_fully_sharded(self.mesh.shape.size("state"))
