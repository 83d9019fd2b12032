"""Planning the step that a Trainer is about to run: an example batch, the blocks, a trace, and the plan."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn
from torch import nn

from lightning_3d.config.settings import ThreeDConfig
from lightning_3d.distributed.agreement import on_rank_zero
from lightning_3d.distributed.mesh import MeshShape
from lightning_3d.model.blocks import find_blocks
from lightning_3d.pipeline.microbatches import detached_from_inference, split_batch
from lightning_3d.planning.plan import Plan, make_plan
from lightning_3d.planning.split_blocks import greatest_imbalance, is_balanced, refine
from lightning_3d.planning.tensor_blocks import plan_blocks
from lightning_3d.torch_internals.lightning_loops import before_transfer
from lightning_3d.trace.interception import Router, routed
from lightning_3d.trace.step_tracing import StepTracing, TracedEffects
from lightning_3d.trace.trace import Trace
from lightning_3d.trainer.batches import example_batch
from lightning_3d.trainer.precision import ThreeDPrecision

_STEPS: Mapping[TrainerFn, str] = {
    TrainerFn.FITTING: "training_step",
    TrainerFn.VALIDATING: "validation_step",
    TrainerFn.TESTING: "test_step",
    TrainerFn.PREDICTING: "predict_step",
}


@dataclass(frozen=True, kw_only=True)
class Planned:
    """A plan and what it was made from."""

    plan: Plan
    blocks: Mapping[str, nn.Module]
    """FQN -> block."""
    trace: Trace | None
    """Of one microbatch; None if the plan does not depend on it."""


class Planner:
    """Plans for one Trainer. Rank 0 decides; every rank makes one and calls it.

    Args:
        trainer: Its state says which step is about to run.
        module: The user's module, not parallel yet.
        precision: Whose autocast the step runs under.
        device: Where the step will run.
        effects_of: Makes what follows the step's effects while it is traced.
    """

    def __init__(
        self,
        *,
        trainer: Trainer,
        module: LightningModule,
        config: ThreeDConfig,
        shape: MeshShape,
        precision: ThreeDPrecision,
        device: torch.device,
        effects_of: Callable[[LightningModule, Mapping[str, nn.Module], Router], TracedEffects],
    ) -> None:
        self._trainer, self._module, self._config, self._shape = trainer, module, config, shape
        self._precision, self._device, self._effects_of = precision, device, effects_of
        self._needs_trace = shape.pp * shape.tp > 1

    def plan(self) -> Planned:
        """Find the blocks, trace a microbatch, and plan."""
        microbatch = self._example_microbatch() if self._needs_trace else None
        blocks = self._find_blocks(microbatch)
        trace = self._trace(blocks, microbatch) if self._needs_trace else None
        plan = on_rank_zero(lambda: self._make_plan(trace, blocks), self._device)
        return Planned(plan=plan, blocks=blocks, trace=trace)

    def _example_microbatch(self) -> Any:
        batch = self._trainer.precision_plugin.convert_input(example_batch(self._trainer))
        batch = before_transfer(self._module, batch)
        batch = detached_from_inference(self._trainer.strategy.batch_to_device(batch, dataloader_idx=0))
        return split_batch(batch, self._config.num_microbatches)[0].batch if self._shape.pp > 1 else batch

    def _find_blocks(self, microbatch: Any) -> Mapping[str, nn.Module]:
        """The coarsest blocks that balance the stages."""
        module, pipeline = self._module, self._config.pipeline
        blocks = find_blocks(module, pipeline.partition)
        num_stages, imbalance = len(pipeline.stage_ranks(self._shape.pp)), greatest_imbalance(pipeline.partition)
        if num_stages == 1 or imbalance is None or is_balanced(blocks, num_stages, imbalance):
            return blocks

        def trace_with(finer: Mapping[str, nn.Module]) -> Trace:
            return self._trace(finer, microbatch)

        fqns = on_rank_zero(lambda: list(refine(module, blocks, num_stages, imbalance, trace_with)), self._device)
        return {fqn: module.get_submodule(fqn) for fqn in fqns}

    def _trace(self, blocks: Mapping[str, nn.Module], microbatch: Any) -> Trace:
        with self._step() as name, routed(blocks) as router:
            effects = self._effects_of(self._module, blocks, router)
            return StepTracing(self._module, blocks, router, effects, self._device)(name, microbatch, (0,))

    def _make_plan(self, trace: Trace | None, blocks: Mapping[str, nn.Module]) -> Plan:
        with self._step():
            plan = make_plan(self._module, blocks, trace, self._config, self._shape, self._device)
        if trace is None or self._shape.tp == 1:
            return plan
        return plan_blocks(plan, self._module, blocks, trace, self._config.tensor)

    @contextmanager
    def _step(self) -> Iterator[str]:
        """The name of the step that is about to run, and the autograd and autocast modes of its forward."""
        assert self._trainer.state.fn is not None
        name = _STEPS[self._trainer.state.fn]
        with torch.set_grad_enabled(name == "training_step"), self._precision.forward_context():
            yield name
