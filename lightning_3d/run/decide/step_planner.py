"""Looking at the step that is about to run, and deciding a plan of it; for a fit and for dry runs."""

from __future__ import annotations

from collections.abc import Callable

import torch
from lightning.pytorch import LightningModule

from lightning_3d.config.settings import ThreeDConfig
from lightning_3d.distributed.mesh import MeshShape
from lightning_3d.distributed.rng import Generators
from lightning_3d.pipeline.effects.step_effects import StepEffects
from lightning_3d.planning.observer import ExampleStep, Observation, Observer
from lightning_3d.planning.plan import Plan
from lightning_3d.planning.planner import decide
from lightning_3d.precision.plugin import ThreeDPrecision
from lightning_3d.waits import long_wait

StepOf = Callable[[ThreeDConfig, MeshShape], ExampleStep]
"""Makes the step that is about to run on a mesh."""


class StepPlanner:
    """Plans a step of a model that is not parallel yet, on any mesh; nothing here communicates.

    Args:
        device: Where it would run.
    """

    def __init__(
        self, module: LightningModule, step_of: StepOf, device: torch.device, precision: ThreeDPrecision
    ) -> None:
        self.module, self.step_of, self.device = module, step_of, device
        self._precision = precision

    def look(self, step: ExampleStep, config: ThreeDConfig, shape: MeshShape) -> tuple[Observer, Observation]:
        """Find the model's blocks, and trace the step."""
        observer = Observer(self.module, step, self.device, StepEffects)
        with long_wait(f"Tracing {step.name}"), Generators(self.device).preserved():
            return observer, observer.observe(config, shape)

    def decide(self, observed: Observation, config: ThreeDConfig, shape: MeshShape) -> Plan:
        """The plan of what was observed.

        Raises:
            PlanError: no layout of this model fits the mesh.
        """
        with self._precision.dtype_of_steps():
            return decide(observed, config, shape, self.device)
