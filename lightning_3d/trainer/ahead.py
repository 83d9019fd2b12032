"""Planning a training on any number of ranks in one process, which needs neither the ranks nor the weights."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from lightning.pytorch import LightningModule
from rich.console import Group, RenderableType
from torch import nn

from lightning_3d.config.settings import ThreeDConfig
from lightning_3d.distributed.mesh import resolve_mesh_shape
from lightning_3d.errors import ConfigError, PlanError, SplitError, TraceError
from lightning_3d.memory.rank_memory import size_text
from lightning_3d.pipeline.effects.step_effects import StepEffects
from lightning_3d.pipeline.microbatches import split_batch
from lightning_3d.planning.budget import Budget
from lightning_3d.planning.held_ahead import HeldAhead
from lightning_3d.planning.inline_mode import reason_for_inline
from lightning_3d.planning.plan import Plan
from lightning_3d.planning.planner import ExampleStep, Observer, decide
from lightning_3d.planning.step_memory import StepMemory
from lightning_3d.planning.timing import makespan, sent_bytes
from lightning_3d.precision.plugin import ThreeDPrecision
from lightning_3d.torch_internals.lightning_helpers import takes_batch_index
from lightning_3d.torch_internals.modules import buffers_of
from lightning_3d.trainer.example_step import modes_of

_UNLIMITED = 2**20  # GiB


@dataclass(frozen=True, kw_only=True)
class PlannedAhead:
    """A plan, and what it is predicted to take."""

    plan: Plan
    """With the memory of the ranks, unless activations are offloaded."""
    idle: float
    """The part of a step in which ranks of the pipeline wait for others, on average."""
    load: float
    """The time of a step, waiting included, in the unit of the plan's loads."""
    sent: dict[str, int]
    """Axis of the mesh -> the most bytes that a rank sends over it in a step."""
    step: StepMemory | None = None
    """To plan other budgets; None where activations are offloaded."""

    def __rich__(self) -> RenderableType:
        lines = [f"ranks of the pipeline wait {self.idle:.1%} of a step"] if self.plan.shape.pp > 1 else []
        lines += [f"a rank sends at most {size_text(size)} over {axis} in a step" for axis, size in self.sent.items()]
        return Group(self.plan, *lines)

    def as_dict(self) -> dict[str, Any]:
        """For JSON; sizes in bytes."""
        shape, plan = self.plan.shape, self.plan
        return {
            "world_size": shape.world_size,
            "pipeline_parallel_size": shape.pp,
            "data_parallel_size": shape.dp,
            "tensor_parallel_size": shape.tp,
            "zero_stage": plan.zero_stage,
            "stages": [[block.fqn for block in plan.blocks_of(stage)] for stage in range(plan.num_stages)],
            "memory": [
                {
                    "weights": rank.held.weights,
                    "gradients": rank.held.gradients,
                    "optimizer_states": rank.held.optimizer_states,
                    "peak": rank.peak,
                }
                for rank in plan.memory
            ],
            "idle": self.idle,
            "load": self.load,
            "load_unit": plan.load_unit,
            "sent": self.sent,
        }


def plan_ahead(
    module: LightningModule,
    batch: Any,
    config: ThreeDConfig,
    world_size: int,
    *,
    precision: ThreeDPrecision,
    memory: float | None = None,
    num_states: int = 2,
) -> PlannedAhead:
    """Plan the training of a model, whose weights may be on the meta device, on so many ranks.

    Blocks are looked at as the CPU computes them, and tensor-parallel plans are not proved.

    Args:
        batch: The batch of one replica.
        memory: GiB of a device; None if it is not limited.
        num_states: Numbers that the optimizer keeps for each parameter: 2 for AdamW.

    Raises:
        ConfigError: the sizes do not fit the number of ranks.
        PlanError: no layout of this model fits the mesh, or a rank does not fit its memory.
        TraceError: with ``pipeline.mode="microbatched"``, the stages can't follow the step.
    """
    if world_size < 1 or num_states < 0:
        raise ConfigError(f"{world_size} ranks, {num_states} states of a parameter: use 1 or more, 0 or more")
    shape, device = resolve_mesh_shape(config, world_size), torch.device("cpu")
    if (why := reason_for_inline(module, config)) is not None:
        raise PlanError(f"{type(module).__name__}'s steps run inline, {why}: only microbatched steps are planned ahead")
    precision.convert(module, config.precision, device)
    _fill_buffers(module)
    if not config.activations.offload:
        budget = _UNLIMITED if memory is None else memory
        config = replace(config, activations=replace(config.activations, budget=budget))
    step = _step(module, batch, config, precision)
    try:
        observed = Observer(module, step, device, StepEffects).observe(config, shape)
    except (SplitError, TraceError):
        raise
    except Exception as error:
        cause = error.__cause__ if isinstance(error, PlanError) and error.__cause__ is not None else error
        raise PlanError(
            f"{type(module).__name__}.training_step fails without weights, a Trainer and the data of blocks, as it is"
            f" traced here: {type(cause).__name__}: {cause}. It may run where it trains"
        ) from cause
    with precision.dtype_of_steps():
        plan = decide(observed, config, shape, device)
    held, memory_of_step = HeldAhead(module, plan, config, num_states), None
    if config.activations.plans_memory:
        fits = Budget.of(plan, observed, config, device, accumulates=False, num_sharing=held.num_sharing)
        ranks = [held.of_rank(rank, step.microbatch, device) for rank in range(shape.pp)]
        budgets, memory_of_step = [config.activations.budget_bytes(0, 0)] * shape.pp, fits.step
        plan = fits.decide(plan, plan.blocks_in(module), config, ranks, budgets)
        if memory is None:
            plan = replace(plan, memory=tuple(replace(rank, budget=None) for rank in plan.memory))
    times = [float(stage.load) / shape.tp for stage in plan.stages]
    idle, total = 0.0, sum(times)
    if shape.pp > 1:
        total, idle = makespan(plan.schedule, plan.stage_ranks, plan.num_microbatches, times)
    weights = [held.weights(rank) for rank in range(shape.pp)]
    keeps = config.zero.keeps_gathered(is_microbatched=shape.pp > 1)
    sent = sent_bytes(plan, weights, num_sharing=held.num_sharing, gathers_again=not keeps)
    return PlannedAhead(plan=plan, idle=idle, load=total, sent=sent, step=memory_of_step)


def _fill_buffers(module: nn.Module) -> None:
    """Give buffers on the meta device zeros: code around blocks copies them to where its inputs are."""
    for owner in module.modules():
        buffers = buffers_of(owner)
        for name, buffer in buffers.items():
            if buffer is not None and buffer.is_meta:
                buffers[name] = torch.zeros_like(buffer, device="cpu")


def _step(module: LightningModule, batch: Any, config: ThreeDConfig, precision: ThreeDPrecision) -> ExampleStep:
    name, rest = "training_step", (0,) if takes_batch_index(module.training_step) else ()
    microbatch = split_batch(precision.convert_input(batch), config.num_microbatches)[0].batch
    return ExampleStep(name=name, microbatch=microbatch, modes=modes_of(name, precision), rest=rest)
