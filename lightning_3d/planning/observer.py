"""Observing a model: its blocks, and the trace of an example step. The model is left as it was."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import nn

from lightning_3d.config.activations import ActivationsConfig
from lightning_3d.config.settings import ThreeDConfig
from lightning_3d.distributed.mesh import MeshShape
from lightning_3d.errors import PlanError, ThreeDError, TraceError
from lightning_3d.model.blocks import find_blocks
from lightning_3d.planning.inline_mode import is_microbatched
from lightning_3d.planning.split_blocks import greatest_imbalance, is_balanced, opened_until_enough, split_blocks
from lightning_3d.torch_internals import flex_attention
from lightning_3d.torch_internals.autograd import refuses_saved_tensor_hooks
from lightning_3d.trace.interception import Router, routed
from lightning_3d.trace.step_tracing import StepTracing, TracedEffects
from lightning_3d.trace.trace import Trace
from lightning_3d.trace.world_collectives import world_collectives_refused

EffectsOf = Callable[[LightningModule, Router], TracedEffects]
"""Makes what follows the effects of a module's step while it is traced."""


@dataclass(frozen=True, kw_only=True)
class ExampleStep:
    """A step of the kind that is about to run."""

    name: str
    """``"training_step"``, ``"validation_step"``, ..."""
    microbatch: Any
    modes: Callable[[], AbstractContextManager[None]]
    """The autograd and autocast modes of its forward."""
    rest: Sequence[Any] = (0,)
    """Its further arguments."""
    has_data: bool = False
    """Whether code outside of blocks has the data of all tensors when it runs."""
    accumulates: bool = False
    """Whether gradients wait for further steps."""
    num_states: int = 2
    """Numbers that the optimizer keeps for each parameter; as AdamW, before there is one."""
    with_simulated_fit_start: Callable[[], AbstractContextManager[None]] = nullcontext
    """Inside, the module is as the first step finds it, as far as that can be had before."""


@dataclass(frozen=True, kw_only=True)
class Observation:
    """A model, its blocks, and what a step does with them."""

    module: LightningModule
    blocks: Mapping[str, nn.Module]
    """FQN -> block."""
    step: ExampleStep
    trace: Trace | None
    """None on a mesh whose plan does not depend on it."""
    inline: str | None = None
    """Why steps run in inline mode, if they do."""


class Observer:
    """Looks at a model that is not parallel yet. Nothing here communicates.

    Args:
        step: About to run.
        device: Where it will run.
        effects_of: For the traces.
    """

    def __init__(self, module: LightningModule, step: ExampleStep, device: torch.device, effects_of: EffectsOf) -> None:
        self._module, self._step, self._device, self._effects_of = module, step, device, effects_of
        self._notes_storages = self._is_budgeted = False

    def observe(self, config: ThreeDConfig, shape: MeshShape) -> Observation:
        """Find the coarsest blocks that balance the stages, and trace the step, in inline mode for tensor parallel."""
        pipeline = config.pipeline
        self._is_budgeted = config.activations.plans_memory and self._step.name == "training_step"
        is_cut_by_cost = is_microbatched(config, shape) and pipeline.partition == "auto"
        self._notes_storages = self._is_budgeted or is_cut_by_cost
        blocks = find_blocks(self._module, pipeline.partition)
        num_stages, imbalance = len(pipeline.stage_ranks(shape.pp)), greatest_imbalance(pipeline.partition)
        if imbalance is not None and is_microbatched(config, shape):
            if not is_balanced(blocks, num_stages, imbalance):
                blocks = split_blocks(self._module, blocks, num_stages, imbalance, self._trace)
        elif imbalance is not None and num_stages > 1:
            blocks = opened_until_enough(blocks, num_stages)
        if shape.tp > 1 or is_microbatched(config, shape):
            return self.of_blocks(blocks)
        if self._is_budgeted:
            return self._for_budget(blocks, config.activations)
        return Observation(module=self._module, blocks=blocks, step=self._step, trace=None)

    def _for_budget(self, blocks: Mapping[str, nn.Module], config: ActivationsConfig) -> Observation:
        """Trace a step that nothing but a budget of memory needs."""
        try:
            return self.of_blocks(blocks)
        except Exception as error:
            raise PlanError(
                f"activations.budget={config.budget!r} is planned by a trace of {self._step.name}, which failed:"
                f" {type(error).__name__}: {error}. It may run where it is not traced: leave out activations.budget and"
                " recompute='auto'; activations.recompute='full' saves memory without either."
            ) from error

    def of_blocks(self, blocks: Mapping[str, nn.Module]) -> Observation:
        """Trace the step with the given blocks."""
        return Observation(module=self._module, blocks=blocks, step=self._step, trace=self._trace(blocks))

    def _trace(self, blocks: Mapping[str, nn.Module]) -> Trace:
        """Trace the step; where it fails without what comes before it, after a rehearsal of that."""
        try:
            return self._traced(blocks, rehearses=False)
        except ThreeDError:
            raise
        except Exception as error:
            try:
                return self._traced(blocks, rehearses=True)
            except ThreeDError:
                raise
            except Exception as other:
                if (type(other), str(other)) == (type(error), str(error)):  # the step's own
                    raise error from None
                error.add_note(
                    f"{self._step.name} was called before training, to plan, and again with optimizers and after the"
                    f" hooks that come before it: {type(other).__name__}: {other}"
                )
                raise error from other

    def _traced(self, blocks: Mapping[str, nn.Module], *, rehearses: bool, with_data: bool = False) -> Trace:
        step = self._step
        before = step.with_simulated_fit_start() if rehearses else nullcontext()
        refused = nullcontext() if step.has_data else world_collectives_refused()
        try:
            eager = torch.compiler.set_stance("force_eager")
            with eager, flex_attention.calls_seen(), step.modes(), routed(blocks) as router, before, refused:
                tracing = StepTracing(self._module, router, self._effects_of(self._module, router), self._device)
                notes = self._notes_storages
                return tracing(step.name, step.microbatch, step.rest, with_data=with_data, notes_storages=notes)
        except Exception as error:
            if self._notes_storages and not self._is_budgeted and refuses_saved_tensor_hooks(error):
                self._notes_storages = False  # stages are cut without them, too
            elif isinstance(error, TraceError) and error.lacks_data and step.has_data:
                with_data = True
            else:
                raise
        return self._traced(blocks, rehearses=rehearses, with_data=with_data)
