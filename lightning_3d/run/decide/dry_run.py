"""Planning a training on any number of ranks in one process, which needs neither the ranks nor the weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from lightning.pytorch import LightningModule
from rich.console import Group, RenderableType
from torch import nn
from torch.optim import Optimizer

from lightning_3d.config.settings import ThreeDConfig
from lightning_3d.context.dims import SequenceDims
from lightning_3d.distributed.axes import AXES
from lightning_3d.distributed.machine import Machine
from lightning_3d.distributed.mesh import MeshShape, refuse_unbuilt, resolve_mesh_shape
from lightning_3d.errors import ConfigError, PlanError, SplitError, TraceError
from lightning_3d.memory.rank_memory import GIB, size_text
from lightning_3d.pipeline.microbatches import split_batch
from lightning_3d.planning.budget import decide_recomputation
from lightning_3d.planning.held import StateMemory, StateShapes, least_held
from lightning_3d.planning.inline_mode import follows_from_stages, inline_text, reason_for_inline, unfollowed_text
from lightning_3d.planning.layouts import Choice, Layout, Prediction, candidates, search
from lightning_3d.planning.observer import ExampleStep, Observation
from lightning_3d.planning.optimizer_plan import OptimizerPlan
from lightning_3d.planning.plan import Plan
from lightning_3d.planning.slices import first_with_sequence
from lightning_3d.planning.step_memory import StepMemory
from lightning_3d.planning.step_time import StepSeconds
from lightning_3d.planning.timing import makespan, sent_bytes
from lightning_3d.precision.plugin import ThreeDPrecision
from lightning_3d.run.decide.example_step import modes_of
from lightning_3d.run.decide.step_planner import StepOf, StepPlanner
from lightning_3d.torch_internals.lightning_helpers import takes_batch_index
from lightning_3d.torch_internals.modules import buffers_of
from lightning_3d.zero.optimizer_kind import num_states, optimizer_kind

_UNLIMITED = 2**20  # GiB


@dataclass(frozen=True, kw_only=True)
class DryRunPlan:
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
    seconds: StepSeconds | None = None
    """The time of a step on the machine that was given."""

    def __rich__(self) -> RenderableType:
        lines = [f"ranks of the pipeline wait {self.idle:.1%} of a step"] if self.plan.shape.pp > 1 else []
        lines += [f"a rank sends at most {size_text(size)} over {axis} in a step" for axis, size in self.sent.items()]
        if (of := self.seconds) is not None:
            lines.append(
                f"a step is predicted to take {1e3 * of.total:,.1f} ms: forwards and backwards"
                f" {1e3 * of.computing:,.1f}, waiting for replicas {1e3 * of.reducing:,.1f}, the optimizer"
                f" {1e3 * of.stepping:,.1f}"
            )
        return Group(self.plan, *lines)

    def as_dict(self) -> dict[str, Any]:
        """For JSON; sizes in bytes."""
        shape, plan = self.plan.shape, self.plan
        return {
            "world_size": shape.world_size,
            **{axis.setting: shape.sizes[axis.name] for axis in AXES},
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
            "seconds": None if self.seconds is None else self.seconds.total,
        }


class DryRun:
    """Plans one model in several layouts; what is observed of it is shared by those to which it looks the same.

    Args:
        device: Where it would run.
        checks: Raises for a layout that can't run, whatever is planned.
        optimizer: That it is to be trained with, made of any parameters.
    """

    def __init__(
        self,
        module: LightningModule,
        step_of: StepOf,
        device: torch.device,
        precision: ThreeDPrecision,
        *,
        checks: Callable[[ThreeDConfig, MeshShape], None] = lambda config, shape: None,
        optimizer: Optimizer | None = None,
    ) -> None:
        self._optimizer = None if optimizer is None else (type(optimizer).__name__, optimizer_kind(optimizer))
        self.module, self._device, self._checks = module, device, checks
        self._planner = StepPlanner(module, step_of, device, precision)
        self._observed: dict[tuple[int, int], Observation] = {}

    @classmethod
    def without_trainer(
        cls,
        module: LightningModule,
        batch: object,
        config: ThreeDConfig,
        precision: ThreeDPrecision,
        optimizer: Optimizer | int,
    ) -> DryRun:
        """For a model whose weights may be on the meta device, as the CPU computes it, on the batch of a replica.

        Args:
            optimizer: Made of any parameters; or the number of states of each parameter alone.
        """
        known, num = (optimizer, num_states(optimizer)) if isinstance(optimizer, Optimizer) else (None, optimizer)
        device = torch.device("cpu")
        precision.convert(module, config.precision, device)
        _fill_buffers(module)
        step_of = partial(_step, module, batch, precision, num)
        return cls(module, step_of, device, precision, optimizer=known)

    def plan(
        self, config: ThreeDConfig, shape: MeshShape, memory: float | None, machine: Machine | None = None
    ) -> DryRunPlan:
        """Plan it on a mesh.

        Args:
            memory: GiB of a device; None if it is not limited.
            machine: To predict how long a step takes.

        Raises:
            PlanError: no layout of this model fits the mesh, or a rank does not fit its memory.
            TraceError: the stages can't follow the step.
        """
        self._checks(config, shape)
        if (why := reason_for_inline(self.module, config)) is not None:
            raise self._inline(why)
        if not config.activations.offload:
            budget = _UNLIMITED if memory is None else memory
            config = replace(config, activations=replace(config.activations, budget=budget))
        device = self._device
        with self._told_of_inline(config, shape, SplitError, TraceError):
            observed = self.observe(config, shape)
        with self._told_of_inline(config, shape, PlanError):
            plan = self._planner.decide(observed, config, shape)
        state = StateMemory.of_plan(StateShapes(self.module), plan, config, observed.step.num_states)
        if self._optimizer is not None:
            name, kind = self._optimizer
            received = max(state.received_for_steps(kind, pp_rank) for pp_rank in range(shape.pp))
            steps = OptimizerPlan(name=name, kind=kind, found="tried on small tensors", received_bytes=received)
            plan = replace(plan, optimizers=(steps,))
        seconds, step = None, None
        if config.activations.plans_memory:
            step, batch = StepMemory(observed, plan.tensors, config, shape, device), observed.step.microbatch
            budgets = [config.activations.budget_bytes(0, 0)] * shape.pp
            plan = decide_recomputation(plan, step, observed.blocks, config, state.of_ranks(batch, device), budgets)
            if memory is None:
                plan = replace(plan, memory=tuple(replace(rank, budget=None) for rank in plan.memory))
        times = [float(stage.load) for stage in plan.stages]
        idle, total = 0.0, sum(times)
        if shape.pp > 1:
            total, idle = makespan(plan.schedule, plan.stage_ranks, plan.num_microbatches, times)
        if machine is not None and step is not None:
            seconds = StepSeconds.of(plan, step, state, machine)
        return DryRunPlan(plan=plan, idle=idle, load=total, sent=sent_bytes(plan, state), step=step, seconds=seconds)

    @contextmanager
    def _told_of_inline(self, config: ThreeDConfig, shape: MeshShape, *errors: type[Exception]) -> Iterator[None]:
        """Say what training does where such an error is one of stages."""
        try:
            yield
        except errors as error:
            if shape.pp == 1 or not follows_from_stages(error, config):
                raise
            raise self._inline(unfollowed_text(error)) from error

    def _inline(self, why: str) -> PlanError:
        name = type(self.module).__name__
        return PlanError(f"{name}: only steps in microbatches are planned ahead, but {inline_text(why)}")

    def observe(self, config: ThreeDConfig, shape: MeshShape) -> Observation:
        """Trace the step on a mesh.

        Raises:
            PlanError: it fails.
            TraceError: the stages can't follow it.
        """
        key = config.num_microbatches, shape.pp
        if key not in self._observed:
            step = self._planner.step_of(config, shape)
            self._observed[key] = self._looked_at(step, config, shape)
        observed = self._observed[key]
        if shape.pp > 1 and observed.trace is not None:
            observed.trace.refuse_what_counts_once()
        return observed

    def _looked_at(self, step: ExampleStep, config: ThreeDConfig, shape: MeshShape) -> Observation:
        try:
            return self._planner.look(step, config, shape)[1]
        except (SplitError, TraceError):
            raise
        except Exception as error:
            cause = error.__cause__ if isinstance(error, PlanError) and error.__cause__ is not None else error
            raise PlanError(
                f"{type(self.module).__name__}.training_step fails without weights, a Trainer and the data of blocks,"
                f" as it is traced here: {type(cause).__name__}: {cause}. It may run where it trains"
            ) from cause


def search_layout(
    ahead: DryRun,
    config: ThreeDConfig,
    machine: Machine,
    world_size: int,
    memory: int | None,
    *,
    num_samples: int,
) -> Choice:
    """The fastest layout that fits, of those that keep what is set.

    Args:
        memory: Bytes of a device; None if it is not limited.
        num_samples: Of a replica's batch; 1 if it can't be split.

    Raises:
        PlanError: the step can't be traced.
    """
    layouts = candidates(config, world_size, machine.ranks_per_node, num_samples)
    if not layouts:
        raise ConfigError(f"no layout of {world_size} ranks has the sizes that are set: {config}")
    most = config.activations.budget_bytes(memory or 0, memory or 0)
    is_free = config.activations.recompute == "none"
    recompute = "auto" if is_free else config.activations.recompute
    config = replace(config, activations=replace(config.activations, recompute=recompute, budget="auto"))

    def planned(layout: Layout) -> DryRunPlan:
        own = layout.of(config)
        refuse_unbuilt(own, layout.shape)
        return ahead.plan(own, resolve_mesh_shape(own, world_size), most / GIB or None, machine)

    def predict(layout: Layout) -> Prediction:
        found = planned(layout)
        assert found.seconds is not None
        tensors = [block.tensor for block in found.plan.blocks if block.tensor is not None]
        if layout.shape.tp > 1 and not any(tensor.is_sharded for tensor in tensors):
            raise PlanError(f"no block can be sharded: {next((each.reason for each in tensors), None)}")
        return Prediction(
            seconds=found.seconds.total,
            computing=found.seconds.computing,
            peak=max(rank.peak for rank in found.plan.memory),
            recomputes=is_free and any(block.is_recomputed for block in found.plan.blocks),
        )

    replicas = layouts[0].of(config)
    observed = ahead.observe(replicas, resolve_mesh_shape(replicas, world_size))
    why_not = partial(too_large, ahead.module, config, memory, observed.step.num_states)
    choice = search(layouts, predict, why_not, num_samples, keeps_replicas=config.layout == "auto")
    dims = SequenceDims(config.context, observed.blocks)
    has_sequence = observed.trace is not None and first_with_sequence(observed.trace, dims) is not None
    if choice.predicted or config.context_parallel_size > 1 or not has_sequence:
        return choice
    layouts = candidates(config, world_size, machine.ranks_per_node, num_samples, cuts_sequences=True)
    on_slices = search(layouts, predict, why_not, num_samples) if layouts else choice
    if not on_slices.predicted:
        return choice
    reason = f"no rank has room for whole sequences, and {on_slices.reason}"
    return replace(on_slices, reason=reason, refused={**choice.refused, **on_slices.refused})


def too_large(
    module: nn.Module, config: ThreeDConfig, memory: int | None, num_states: int, layout: Layout
) -> str | None:
    """Why a rank has no room for its training state, whatever its activations take, or None."""
    own = layout.of(config)
    least = least_held(module, own, num_states, shape=resolve_mesh_shape(own, layout.shape.world_size))
    if memory is None or least <= memory:
        return None
    return f"a rank needs at least {size_text(least)} of the {size_text(memory)} that it has, for the training state"


def _fill_buffers(module: nn.Module) -> None:
    """Give buffers on the meta device zeros: code around blocks copies them to where its inputs are."""
    for owner in module.modules():
        buffers = buffers_of(owner)
        for name, buffer in buffers.items():
            if buffer is not None and buffer.is_meta:
                buffers[name] = torch.zeros_like(buffer, device="cpu")


def _step(
    module: LightningModule,
    batch: object,
    precision: ThreeDPrecision,
    num_states: int,
    config: ThreeDConfig,
    shape: MeshShape,
) -> ExampleStep:
    name, rest = "training_step", (0,) if takes_batch_index(module.training_step) else ()
    microbatch = split_batch(precision.convert_input(batch), config.num_microbatches)[0].batch
    modes = modes_of(name, precision)
    return ExampleStep(name=name, microbatch=microbatch, modes=modes, rest=rest, num_states=num_states)
