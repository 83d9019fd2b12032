"""Making a model parallel: observe, decide, agree, prove, apply.

observe   an example microbatch, the blocks, a trace: on every rank, without communication
decide    the plan, a pure function of what was observed
agree     rank 0's plan for all
prove     each sharded block against its dense self, on this rank's weights
apply     tensor parallel, ZeRO, pipeline
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.optim import Optimizer

from lightning_3d.activations.offload import Offload
from lightning_3d.activations.partitioned_inputs import PartitionedInputs
from lightning_3d.activations.recomputation import Recomputation
from lightning_3d.activations.saved_tensor import SavedTensor
from lightning_3d.activations.transfers import SideStreams
from lightning_3d.compile.blocks import BlockCompiler
from lightning_3d.config.settings import ThreeDConfig
from lightning_3d.data.batch_guard import BatchGuard
from lightning_3d.distributed.agreement import on_one_rank
from lightning_3d.distributed.mesh import Mesh
from lightning_3d.distributed.rng import Generators, StepRandomness, join_replica
from lightning_3d.model.block_runner import Compiled, running
from lightning_3d.model.initial_weights import (
    check_same_model,
    is_on_meta,
    move_parameters,
    place_buffers,
    place_weights,
)
from lightning_3d.model.snapshot import preserved
from lightning_3d.parts.copies import copies_of, lay_out_copies
from lightning_3d.parts.layout import Layout, shard_layout
from lightning_3d.parts.module import answer_for_parts, holds_parts
from lightning_3d.parts.stages import PipelineStages
from lightning_3d.pipeline.engine import PipelineEngine
from lightning_3d.pipeline.inline.between_steps import CallsBetweenSteps
from lightning_3d.pipeline.inline.exchange import Exchange
from lightning_3d.pipeline.inline.step import InlineStep
from lightning_3d.planning.budget import Budget
from lightning_3d.planning.held import StateMemory, StateShapes
from lightning_3d.planning.inline_mode import inline_text
from lightning_3d.planning.plan import Findings, Plan
from lightning_3d.planning.step_memory import StepMemory
from lightning_3d.precision.plugin import ThreeDPrecision
from lightning_3d.ranks.rendezvous import Rendezvous
from lightning_3d.sharding.axis import MeshAxis
from lightning_3d.tensor.vocabulary.fused_heads import FusedHeads, HeadPlan
from lightning_3d.tensor.vocabulary.lazy_tensor import made
from lightning_3d.torch_internals.lightning_helpers import callbacks_of, set_device
from lightning_3d.torch_internals.pytree import tree_map
from lightning_3d.trace.interception import Router
from lightning_3d.trainer.inline_fallback import InlineFallback
from lightning_3d.trainer.offload import offload_parameters, offload_policy
from lightning_3d.trainer.shared_buffers import SharedBuffers
from lightning_3d.trainer.step_planner import Planned, StepPlanner
from lightning_3d.trainer.step_runner import TRAINING, PipelineRunner, StepRunner, WholeModelRunner
from lightning_3d.trainer.tensor_parallel import apply_blocks, prove_blocks, warn_of_whole_sequences
from lightning_3d.waits import CountedWait, long_wait
from lightning_3d.zero.engine import Zero
from lightning_3d.zero.fully_sharded import FullySharded, is_shardable, lay_out_contiguously
from lightning_3d.zero.gradients import Gradients
from lightning_3d.zero.optimizer_kind import num_states
from lightning_3d.zero.plain_parameters import PlainParameters


@dataclass(kw_only=True)
class ParallelModel:
    """The model as this rank trains it."""

    plan: Plan
    """Says more when there are optimizers, and when steps have run."""
    zero: Zero
    gradients: Gradients
    router: Router
    """Routes the blocks' calls; to be installed while the Trainer runs."""
    guard: BatchGuard
    buffers: SharedBuffers
    runner: StepRunner
    randomness: StepRandomness
    heads: FusedHeads
    apply_checkpointing: Callable[[Plan], None]
    """Lets blocks be computed again in their backwards, and offload what they keep, as a plan says."""
    budget: Budget | None
    shapes: StateShapes
    """The model's, from before this rank took its part."""
    compiling: CountedWait
    """For blocks that were compiled."""
    layout: Layout
    is_told: bool = False
    """Whether rank 0 has said what layout is running."""

    def held(self, config: ThreeDConfig, optimizers: Iterable[Optimizer]) -> StateMemory:
        """The memory that ranks hold whatever they compute, when these optimizers step the model."""
        return StateMemory.of_plan(self.shapes, self.plan, config, max(map(num_states, optimizers), default=0))

    @property
    def present_plan(self) -> Plan:
        """The plan, with what the steps so far have shown of heads, losses and gathered weights, and how they run."""
        plan, inline, losses = self.plan, dict(self.runner.inline), tuple[str, ...]()
        heads = self.heads.texts
        if (why := inline.pop(TRAINING, None)) is not None:
            plan, heads = replace(plan, inline=why, memory=()), ()  # which was that of microbatches
        elif self.runner.engine is not None:
            losses = self.runner.engine.losses()
        evaluations = tuple(f"{name}: {inline_text(why)}" for name, why in inline.items())
        findings = Findings(losses=losses, evaluations=evaluations, heads=heads, gathers=self.zero.gathers)
        return replace(plan, findings=findings)


def make_parallel(
    *,
    trainer: Trainer,
    module: LightningModule,
    config: ThreeDConfig,
    mesh: Mesh,
    precision: ThreeDPrecision,
    device: torch.device,
    rendezvous: Rendezvous,
    is_restored: bool,
) -> ParallelModel:
    """Plan a model, and carry out what the plan says of this rank; every rank calls it.

    Args:
        is_restored: Whether a checkpoint will be loaded into it.

    Raises:
        PlanError: no layout of this model fits the mesh.
        ConfigError: the ranks were given different models.
    """
    check_same_model(module, is_restored=is_restored)
    is_empty, shapes = is_on_meta(module), StateShapes(module)
    place_buffers(module, device)
    join_replica(mesh, device)
    planned = StepPlanner(trainer, module, mesh.shape, precision, device).plan(config)
    making = _Making(trainer, module, planned, mesh, precision, device, rendezvous)
    with long_wait("Placing weights"):
        making.place()
    plan = making.shard_blocks(is_empty=is_empty)
    own = {block.fqn: making.blocks[block.fqn] for block in plan.blocks_on(mesh.pp_rank)}
    router = making.router(own)
    zero = making.share_state(plan)
    offload = Offload(device, SideStreams(device)) if config.activations.offload else None
    full_backward_stages: set[int] = set()  # stages whose backward stays in one piece
    apply_checkpointing = partial(
        _apply_checkpointing, own, planned.config, mesh, device, offload, full_backward_stages
    )
    apply_checkpointing(plan)
    _let_meet(own.values(), mesh, rendezvous)
    for block in own.values():
        running(block).read = partial(tree_map, made)
    heads = making.heads(plan)
    seed = on_one_rank(torch.initial_seed)
    randomness = StepRandomness(seed=seed, num_replicas=mesh.shape.dp, dp_rank=mesh.dp_rank, device=device)
    gradients = Gradients(module, zero, plan.state_ranks, mesh, device)
    return ParallelModel(
        plan=plan,
        zero=zero,
        gradients=gradients,
        guard=BatchGuard(planned.config.batch, mesh, device),
        buffers=SharedBuffers(module, mesh, device),
        router=router,
        runner=making.runner(plan, router, zero, gradients, randomness, heads, full_backward_stages),
        randomness=randomness,
        heads=heads,
        compiling=making.compiling,
        apply_checkpointing=apply_checkpointing,
        budget=making.budget(plan),
        shapes=shapes,
        layout=making.shard_layout(plan, zero),
    )


class _Making:
    """The rooms that a planned model passes through on this rank."""

    def __init__(
        self,
        trainer: Trainer,
        module: LightningModule,
        planned: Planned,
        mesh: Mesh,
        precision: ThreeDPrecision,
        device: torch.device,
        rendezvous: Rendezvous,
    ) -> None:
        self._trainer, self._module, self._planned, self._config = trainer, module, planned, planned.config
        self._mesh, self._precision, self._device = mesh, precision, device
        self._rendezvous, self.compiling = rendezvous, CountedWait()
        self.blocks = planned.plan.blocks_in(module)
        self.compiled: Callable[[nn.Module], Compiled | None] = lambda block: None
        if self._config.compile.enabled:
            is_telling = mesh.dp_rank == 0 and mesh.coordinate.tp == 0
            compiling, tp = self.compiling, mesh.axis("tp")
            self.compiled = BlockCompiler(self._config.compile, tp, compiling, made, is_telling=is_telling).of
        self._is_microbatched = mesh.shape.pp > 1 and planned.plan.inline is None
        self._is_fully_sharded = planned.config.zero.is_fully_sharded(mesh.shape.dp)

    def place(self) -> None:
        """Give this rank the weights of its stages."""
        if self._is_fully_sharded:
            lay_out_contiguously(self._module)
        is_by_block = self._is_fully_sharded or self._mesh.shape.tp > 1  # that come to the device one after the other
        first = torch.device("cpu") if is_by_block else self._device
        holds = partial(self._planned.plan.holds, self._mesh.pp_rank)
        place_weights(self._module, holds, self._device, parameters_on=first)
        set_device(self._module, device=self._device)

    def shard_blocks(self, *, is_empty: bool) -> Plan:
        """Tensor parallel: shard the blocks whose plans prove out, on other weights while the model has none; the plan
        says which.
        """
        module, mesh, device, config, plan = self._module, self._mesh, self._device, self._config, self._planned.plan
        if mesh.shape.tp > 1:
            warn_of_whole_sequences(plan)
            # The user's code that runs before training draws no numbers of it, and modules beside blocks keep nothing.
            with Generators(device).preserved(), self._precision.dtype_of_steps(), preserved(module):
                if config.tensor.verify:
                    observed = self._planned.observed
                    plan = prove_blocks(plan, observed, mesh, config.tensor, device, self.compiled, is_empty)
            apply_blocks(plan, module, self.blocks, mesh, device)
        # FSDP2 takes those that it shards unit by unit.
        moved = {p for p in module.parameters() if not (self._is_fully_sharded and is_shardable(p))}
        move_parameters(module, moved, device)
        return plan

    def router(self, own: Mapping[str, nn.Module]) -> Router:
        """Routes calls of blocks to this rank's own, compiled if that is wanted."""
        return Router(self.blocks, absent=self.blocks.keys() - own.keys(), compiled=self.compiled)

    def share_state(self, plan: Plan) -> Zero:
        """ZeRO: share the training state between the replicas."""
        module, mesh, config = self._module, self._mesh, self._config.zero
        if not self._is_fully_sharded:
            stages = _pipeline_stages(plan, self.blocks) if self._is_microbatched else {}
            pp_ranks = {parameter: plan.state_ranks[fqn] for fqn, parameter in module.named_parameters()}
            return PlainParameters(module, mesh=mesh, config=config, pipeline_stages=stages, pp_ranks=pp_ranks)
        zero = FullySharded(
            module,
            mesh=mesh,
            config=config,
            chains=[[self.blocks[block.fqn] for block in plan.blocks_of(i)] for i in plan.stages_on(mesh.pp_rank)],
            offload=offload_policy(config.offload_params, self._device),
            device=self._device,
            optimizes_manually=not module.automatic_optimization,
            keeps=config.keeps_gathered(is_microbatched=self._is_microbatched),
            casts_to=None if self._config.compile.enabled else self._precision.casts_to,
        )
        zero.parameter_store = offload_parameters(config.offload_params, zero.root)
        return zero

    def heads(self, plan: Plan) -> FusedHeads:
        """The heads that may run with their losses."""
        planned = {
            block.fqn: (
                self.blocks[block.fqn],
                HeadPlan(tensor=block.tensor, is_recomputed=block.is_recomputed, is_offloaded=block.is_offloaded),
            )
            for block in (plan.blocks if self._config.activations.fused_loss == "auto" else ())
        }
        tp = self._mesh.sliced("tp").mesh.flatten().tolist()
        sync_check = partial(self._rendezvous.sync_check, tp, in_steps=True)
        return FusedHeads(planned, MeshAxis(self._mesh.axis("tp")) if len(tp) > 1 else None, sync_check)

    def runner(
        self,
        plan: Plan,
        router: Router,
        zero: Zero,
        gradients: Gradients,
        randomness: StepRandomness,
        heads: FusedHeads,
        full_backward_stages: set[int],
    ) -> StepRunner:
        """Pipeline: runs steps in microbatches, or inline, or at once."""
        module, mesh, precision, device = self._module, self._mesh, self._precision, self._device
        precision.attach(norm=gradients.norm, zero=zero)
        inline = self._inline(plan, router, zero) if mesh.shape.pp > 1 else None
        if not self._is_microbatched:
            return WholeModelRunner(module, zero, randomness, heads, inline)
        engine = PipelineEngine(
            module=module,
            rank_module=zero.root,
            router=router,
            plan=plan,
            mesh=mesh,
            randomness=randomness,
            device=device,
            around_backward=zero.stage_backward,
            full_backward_stages=full_backward_stages,
            has_budget=self._config.activations.plans_memory,
            sit_out=lambda fqns: zero.sit_out([self.blocks[fqn] for fqn in fqns]),
            shares_evaluations=self._is_fully_sharded,
        )
        assert inline is not None
        of_blocks = {parameter for block in self.blocks.values() for parameter in block.parameters()}
        return PipelineRunner(
            module,
            zero,
            engine,
            gradients,
            mode=self._config.pipeline.mode,
            fallback=InlineFallback(module, zero, gradients, randomness, inline, of_blocks, precision),
            splits_backward=self._config.pipeline.splits_backward,
            precision=precision,
            heads=heads,
        )

    def _inline(self, plan: Plan, router: Router, zero: Zero) -> InlineStep:
        """Let calls of blocks, between steps and in those that run inline, come to where their weights are."""
        homes = {block.fqn: plan.stage_ranks[block.stages[0]] for block in plan.blocks}
        has_collectives = isinstance(zero, FullySharded) or self._mesh.shape.tp > 1
        exchange = Exchange(self._mesh, self._device, has_collectives=has_collectives)
        inline = InlineStep(self._module, router, exchange, homes)
        has_backward = plan.inline is not None
        ranks, met, around = self._sharing(zero), self._rendezvous, zero.root.around
        calls = CallsBetweenSteps(inline, ranks, met, around, has_backward=has_backward)
        for fqn in homes:
            running(self.blocks[fqn]).pipeline_exchange = calls.run
        return inline

    def _sharing(self, zero: Zero) -> list[int]:
        """The ranks that have the model among them, with this one."""
        shared = ("pp", "dp_shard", "tp") if isinstance(zero, FullySharded) else ("pp", "tp")
        return sorted(self._mesh.sliced(*shared).mesh.flatten().tolist())

    def budget(self, plan: Plan) -> Budget | None:
        """The memory that the traced step takes, where it is to be planned."""
        observed = self._planned.observed
        if observed.step.name != "training_step" or not self._config.activations.plans_memory:
            return None
        step = StepMemory(observed, plan.tensors, self._config, plan.shape, self._device)
        return Budget(step=step, batch=observed.step.microbatch)

    def shard_layout(self, plan: Plan, zero: Zero) -> Layout:
        """Let the model, and copies of it that callbacks hold, answer for the parts that this rank has of them."""
        mesh, device, met = self._mesh, self._device, self._rendezvous
        copies: list[nn.Module] = []
        if self._mesh.shape.is_model_parallel or isinstance(zero, FullySharded):
            copies = copies_of(self._module, callbacks_of(self._trainer))
            lay_out_copies(copies, self._module, device)
        ranks = self._sharing(zero)
        stages = PipelineStages(plan=plan, mesh=mesh, device=device, ranks=ranks, rendezvous=met)
        for module in (self._module, *copies):
            answer_for_parts(module, met, stages)
        layout = Layout(self._module, mesh, device, copies)
        shard_layout(layout)
        return layout


def _let_meet(blocks: Iterable[nn.Module], mesh: Mesh, rendezvous: Rendezvous) -> None:
    """Let the ranks that share weights of a block meet before its calls, in steps too if they have the same samples."""
    for block in blocks:
        axes = ("dp_shard", "tp") if isinstance(block, FSDPModule) else ("tp",)
        ranks = mesh.sliced(*axes).mesh.flatten().tolist()
        if len(ranks) > 1 and holds_parts(block):
            running(block).sync_check = partial(
                rendezvous.sync_check, ranks, in_steps=not isinstance(block, FSDPModule)
            )


def _apply_checkpointing(
    own: Mapping[str, nn.Module],
    config: ThreeDConfig,
    mesh: Mesh,
    device: torch.device,
    offload: Offload | None,
    full_backward_stages: set[int],
    plan: Plan,
) -> None:
    """Apply activation checkpointing and offload to this rank's blocks, as planned."""
    generators = Generators(device)
    keep = SavedTensor if offload is None else offload.keep
    inputs = PartitionedInputs(mesh.group("tp"), keep).saved if config.activations.partition else nullcontext
    full_backward_stages.clear()
    # Where a schedule splits the backward, torch would compute a block again for each group of weights.
    again = [block for block in plan.blocks if block.is_recomputed or config.compile.enabled]
    full_backward_stages.update(stage for block in again for stage in block.stages)
    for block in plan.blocks:
        if block.fqn not in own:
            continue
        recomputed = None
        if block.recompute != "none":
            recomputed = Recomputation(block.fqn, own[block.fqn], block.recompute, generators, made, inputs, keep)
        runner = running(own[block.fqn])
        is_left = config.compile.enabled and block.recompute == "selective"  # to the compiler
        runner.recomputed, runner.recomputed_eagerly = (None, recomputed) if is_left else (recomputed, None)
        runner.offloaded = None
        if offload is not None and block.is_offloaded:
            runner.offloaded = partial(offload.call, own[block.fqn])


def _pipeline_stages(plan: Plan, blocks: Mapping[str, nn.Module]) -> dict[nn.Parameter, int]:
    """Parameters whose gradients the backward of one pipeline stage alone makes -> that stage."""
    stages: dict[nn.Parameter, set[int]] = {}
    for block in plan.blocks:
        for parameter in blocks[block.fqn].parameters():
            stages.setdefault(parameter, set()).update(block.stages)
    return {parameter: next(iter(of_blocks)) for parameter, of_blocks in stages.items() if len(of_blocks) == 1}
