"""Planning the step that is about to run: in microbatches, or inline where stages can't follow it."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning_utilities.core.rank_zero import rank_zero_info

from lightning_3d.config.settings import ThreeDConfig
from lightning_3d.distributed.agreement import on_one_rank, raise_on_all_ranks
from lightning_3d.distributed.mesh import MeshShape
from lightning_3d.distributed.rng import Generators
from lightning_3d.model.snapshot import preserved
from lightning_3d.pipeline.effects.step_effects import StepEffects
from lightning_3d.planning.inline_mode import follows_from_stages, inline_text, reason_for_inline, unfollowed_text
from lightning_3d.planning.observer import Observation, Observer
from lightning_3d.planning.plan import Plan
from lightning_3d.planning.planner import decide
from lightning_3d.precision.plugin import ThreeDPrecision
from lightning_3d.trainer.example_step import example_step
from lightning_3d.waits import long_wait


@dataclass(frozen=True, kw_only=True)
class Planned:
    """A plan, and what it is based on."""

    config: ThreeDConfig
    """With the mode in which the pipeline runs."""
    observed: Observation
    plan: Plan


class StepPlanner:
    """Plans a step of a model that is not parallel yet.

    Args:
        device: Where it will run.
    """

    def __init__(
        self,
        trainer: Trainer,
        module: LightningModule,
        shape: MeshShape,
        precision: ThreeDPrecision,
        device: torch.device,
    ) -> None:
        self._trainer, self._module, self._shape = trainer, module, shape
        self._precision, self._device = precision, device

    def plan(self, config: ThreeDConfig) -> Planned:
        """Plan it, alike on all ranks; every rank calls it.

        Raises:
            Exception: with ``pipeline.mode="microbatched"``, why stages can't follow the step; else inline, what
                can't run there either.
        """
        if (why := reason_for_inline(self._module, config)) is not None:
            return self._inline(config, why)
        if self._shape.pp == 1:
            return self._decided(config, *self._look(config))
        try:
            return self._in_stages(config)
        except Exception as error:
            if not follows_from_stages(error, config):
                raise
            return self._inline(config, unfollowed_text(error))

    def _in_stages(self, config: ThreeDConfig) -> Planned:
        with raise_on_all_ranks():  # the user's code may fail on one rank alone
            looked = self._look_at_stages(config)
        return self._decided(config, *looked)

    def _inline(self, config: ThreeDConfig, why: str) -> Planned:
        # Logits are read on all ranks, of which one has the head.
        activations = replace(config.activations, fused_loss="never")
        inline = replace(config, pipeline=config.pipeline.as_inline, activations=activations)
        observer, observed = self._look(inline)
        planned = self._decided(inline, observer, replace(observed, inline=why))
        if config.pipeline.mode == "auto":
            rank_zero_info(f"{type(self._module).__name__}: {inline_text(why)}")
        return planned

    def _look_at_stages(self, config: ThreeDConfig) -> tuple[Observer, Observation]:
        observer, observed = self._look(config)
        if observed.trace is not None:
            observed.trace.refuse_what_counts_once()
        return observer, observed

    def _look(self, config: ThreeDConfig) -> tuple[Observer, Observation]:
        step = example_step(self._trainer, self._module, config, self._shape, self._precision)
        observer = Observer(self._module, step, self._device, StepEffects)
        with long_wait(f"Tracing {step.name}"), Generators(self._device).preserved():
            return observer, observer.observe(config, self._shape)

    def _decided(self, config: ThreeDConfig, observer: Observer, observed: Observation) -> Planned:
        random, dtype = Generators(self._device).preserved(), self._precision.dtype_of_steps()
        with long_wait("Planning"), random, dtype, preserved(self._module):  # on one rank alone, blocks' modules, too
            plan = on_one_rank(lambda: decide(observed, config, self._shape, self._device))
        blocks = plan.blocks_in(self._module)
        if self._shape.tp > 1 and observed.blocks != blocks:  # the user's code differs by rank
            with Generators(self._device).preserved():
                observed = observer.of_blocks(blocks)
        return Planned(config=config, observed=observed, plan=plan)
