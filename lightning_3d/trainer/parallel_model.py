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

from lightning_3d.activations.kept_tensor import KeptTensor
from lightning_3d.activations.offload import Offload
from lightning_3d.activations.partitioned_inputs import PartitionedInputs
from lightning_3d.activations.recomputation import Recomputation
from lightning_3d.activations.selective import is_costly
from lightning_3d.activations.transfers import SideStreams
from lightning_3d.config.compile import CompileConfig
from lightning_3d.config.settings import ThreeDConfig
from lightning_3d.config.zero import ZeroConfig
from lightning_3d.distributed.agreement import on_rank_zero
from lightning_3d.distributed.mesh import Mesh
from lightning_3d.distributed.rng import Generators, StepRandomness, join_replica
from lightning_3d.memory.budget import Budget, accumulates
from lightning_3d.memory.step_memory import step_memory
from lightning_3d.model.block_runner import Dense, running
from lightning_3d.model.dense_compiler import DenseCompiler
from lightning_3d.model.initial_weights import check_same_model, move_buffers, move_parameters, place_weights
from lightning_3d.pipeline.engine import PipelineEngine
from lightning_3d.pipeline.inline.exchange import Exchange
from lightning_3d.pipeline.inline.step import InlineStep
from lightning_3d.planning.optimizer_plan import KindFound, plan_optimizer
from lightning_3d.planning.plan import Plan
from lightning_3d.precision.plugin import ThreeDPrecision
from lightning_3d.ranks.rendezvous import Rendezvous
from lightning_3d.tensor import BlockCompiler
from lightning_3d.tensor.vocabulary.fused_heads import FusedHeads
from lightning_3d.tensor.vocabulary.whole_logits import whole
from lightning_3d.torch_internals.lightning_helpers import set_device
from lightning_3d.trace.interception import Router
from lightning_3d.trainer.anomaly import AnomalyDetection
from lightning_3d.trainer.batches import BatchGuard
from lightning_3d.trainer.full_params import full_params
from lightning_3d.trainer.heads import fused_heads, tables_in, traced_products
from lightning_3d.trainer.held_parts import holds_parts
from lightning_3d.trainer.offload import offload_parameters, offload_policy
from lightning_3d.trainer.shared_buffers import SharedBuffers
from lightning_3d.trainer.stage_calls import StageCalls
from lightning_3d.trainer.step_planner import StepPlanner
from lightning_3d.trainer.step_runner import PipelineRunner, StepRunner, WholeModelRunner
from lightning_3d.trainer.tensor_parallel import apply_blocks, prove_blocks
from lightning_3d.waits import CountedWait, Wait
from lightning_3d.zero.engine import Zero
from lightning_3d.zero.fully_sharded import FullySharded, is_shardable
from lightning_3d.zero.gradients import Gradients
from lightning_3d.zero.optimizer_kind import OptimizerKind, is_known
from lightning_3d.zero.plain_parameters import PlainParameters


@dataclass(frozen=True, kw_only=True)
class ParallelModel:
    """The model as this rank trains it."""

    plan: Plan
    zero: Zero
    gradients: Gradients
    router: Router
    """Routes the blocks' calls; to be installed while the Trainer runs."""
    guard: BatchGuard
    buffers: SharedBuffers
    runner: StepRunner
    randomness: StepRandomness
    heads: FusedHeads
    keep_little: Callable[[Plan], None]
    """Lets blocks be computed again in their backwards, and offload what they keep, as a plan says."""
    budget: Budget | None
    losses: Callable[[], tuple[str, ...]]
    """Gives a line for each step that has shown how its loss comes from microbatches."""
    compiling: CountedWait
    """For blocks that were compiled."""

    @property
    def present_plan(self) -> Plan:
        """The plan, with what the steps so far have shown of heads, losses and gathered weights."""
        return replace(self.plan, heads=self.heads.texts, losses=self.losses(), gathers=self.zero.gathers)

    def with_optimizers(
        self, kinds: Mapping[Optimizer, OptimizerKind], module: nn.Module, config: ZeroConfig
    ) -> ParallelModel:
        """The same with a plan that says who steps what, when that is divided."""
        stages = {parameter: self.plan.state_ranks[fqn] for fqn, parameter in module.named_parameters()}
        optimizers = []
        for optimizer, kind in kinds.items():
            found: KindFound = "known" if is_known(optimizer) else "tried on small tensors"
            found = found if config.optimizer_steps == "auto" else "set by zero.optimizer_steps"
            optimizers.append(plan_optimizer(optimizer, kind, found, self.zero, stages))
        return replace(self, plan=replace(self.plan, optimizers=tuple(optimizers)))

    def within_budget(
        self,
        kinds: Mapping[Optimizer, OptimizerKind],
        module: nn.Module,
        config: ThreeDConfig,
        mesh: Mesh,
        device: torch.device,
    ) -> ParallelModel:
        """The same with a plan of what is recomputed so that every rank fits, where there is a budget.

        Raises:
            PlanError: a rank does not fit.
        """
        if self.budget is None or self.plan.memory:
            return self
        plan = self.budget.plan(self.plan, module, self.zero, kinds, config, mesh, device)
        self.keep_little(plan)
        return replace(self, plan=plan)


def make_parallel(
    *,
    trainer: Trainer,
    module: LightningModule,
    config: ThreeDConfig,
    mesh: Mesh,
    precision: ThreeDPrecision,
    device: torch.device,
    wait: Wait,
    rendezvous: Rendezvous,
) -> ParallelModel:
    """Plan a model, and carry out what the plan says of this rank; every rank calls it.

    Raises:
        PlanError: no layout of this model fits the mesh.
        ConfigError: the ranks were given different models.
    """
    check_same_model(module)
    move_buffers(module, device)
    join_replica(mesh, device)
    compiling = CountedWait(wait)
    planned = StepPlanner(trainer, module, mesh.shape, precision, device, wait).plan(config)
    config, step, observed, plan = planned.config, planned.step, planned.observed, planned.plan
    generators = Generators(device)  # user code that runs before training draws no numbers of it
    blocks = plan.blocks_in(module)
    if mesh.shape.tp > 1 and observed.blocks != blocks:  # the user's code differs by rank
        with generators.preserved():
            observed = planned.observer.of_blocks(blocks)
    is_microbatched = mesh.shape.pp > 1 and plan.inline is None
    is_fully_sharded = config.zero.stage == 3 and (mesh.shape.dp > 1 or config.zero.offload_params != "none")
    first = torch.device("cpu") if is_fully_sharded or mesh.shape.tp > 1 else device  # and then block by block
    with wait("Placing weights"):
        place_weights(module, partial(plan.holds, mesh.pp_rank), device, parameters_on=first)
    set_device(module, device=device)
    if mesh.shape.tp > 1:
        compiler = BlockCompiler(mesh.axis("tp"), config.compile, compiling) if config.compile.enabled else None
        with generators.preserved(), precision.dtype_of_steps():
            if config.tensor.verify:
                plan = prove_blocks(plan, observed, mesh, config.tensor, device, compiler, wait)
        apply_blocks(plan, module, blocks, mesh, device, compiler)
    # FSDP2 takes those that it shards unit by unit.
    move_parameters(module, {p for p in module.parameters() if not (is_fully_sharded and is_shardable(p))}, device)
    own = {block.fqn: blocks[block.fqn] for block in plan.blocks_on(mesh.pp_rank)}
    router = Router(blocks, absent=blocks.keys() - own.keys(), compiled=_compiled_by(config.compile, mesh, compiling))
    zero: Zero
    if is_fully_sharded:
        place = config.zero.offload_params
        chains = [[blocks[block.fqn] for block in plan.blocks_of(i)] for i in plan.stages_on(mesh.pp_rank)]
        policy = offload_policy(place, device)
        zero = FullySharded(
            module,
            mesh=mesh,
            config=config.zero,
            chains=chains,
            offload=policy,
            device=device,
            optimizes_manually=not module.automatic_optimization,
            keeps=is_microbatched if config.zero.reshard_after_forward == "auto" else None,
            casts_to=None if config.compile.enabled else precision.casts_to,
        )
        zero.parameter_store = offload_parameters(place, zero.root)
    else:
        stages = _pipeline_stages(plan, blocks) if is_microbatched else {}
        pp_ranks = {parameter: plan.state_ranks[fqn] for fqn, parameter in module.named_parameters()}
        zero = PlainParameters(module, mesh=mesh, config=config.zero, pipeline_stages=stages, pp_ranks=pp_ranks)
    _let_meet(own.values(), mesh, rendezvous)
    offload = Offload(device, SideStreams(device)) if config.activations.offload else None
    unsplit: set[int] = set()  # stages whose backward stays in one piece
    keep_little = partial(_keep_little, own, config, mesh, device, offload, unsplit)
    keep_little(plan)
    inline: InlineStep | None = None
    if mesh.shape.pp > 1:
        homes = {block.fqn: plan.stage_ranks[block.stages[0]] for block in plan.blocks}
        shared = ("pp", "dp_shard", "tp") if isinstance(zero, FullySharded) else ("pp", "tp")
        ranks = sorted(mesh.sliced(*shared).mesh.flatten().tolist())
        exchange = Exchange(mesh, device)
        calls = StageCalls(exchange, ranks, rendezvous, has_backward=not is_microbatched)
        for fqn, home in homes.items():
            running(blocks[fqn]).joined = partial(calls.run, fqn, home)
        inline = InlineStep(module, router, exchange, homes)
    gradients = Gradients(module, zero, plan.state_ranks, mesh, device)
    randomness = StepRandomness(
        seed=on_rank_zero(torch.initial_seed, device),
        num_replicas=mesh.shape.dp,
        dp_rank=mesh.dp_rank,
        device=device,
    )
    scales = precision.scales_losses
    anomalies = AnomalyDetection(router, mesh, plan.num_stages, device, scales_losses=scales)
    tables = tables_in(module, blocks, config)
    products = traced_products(tables, plan, observed.trace)
    heads = fused_heads(plan, blocks, tables, products, config, mesh)
    runner: StepRunner = WholeModelRunner(module, zero, randomness, anomalies, heads, inline)
    losses: Callable[[], tuple[str, ...]] = tuple
    if is_microbatched:
        engine = PipelineEngine(
            module=module,
            rank_module=zero.root,
            router=router,
            plan=plan,
            mesh=mesh,
            randomness=randomness,
            device=device,
            around_backward=zero.stage_backward,
            wait=wait,
            unsplit=unsplit,
            before_forward=(lambda stage: None) if offload is None else offload.begin_forward,
            has_budget=config.activations.plans_memory,
        )
        losses = engine.losses
        runner = PipelineRunner(
            module,
            zero,
            engine,
            gradients,
            randomness=randomness,
            whole=partial(full_params, module, module, plan, mesh, device, writeback=True),
            splits_backward=config.pipeline.splits_backward,
            loss_scale=lambda: precision.loss_factor,
            anomalies=anomalies,
            heads=heads,
        )
    budget = None
    if observed.trace is not None and observed.trace.storages is not None:
        with step.modes():
            memory = step_memory(
                plan,
                blocks,
                observed.trace,
                device,
                accumulates=accumulates(trainer),
                fuses_loss=config.activations.fused_loss == "auto",
                products=frozenset(products.tables),
                is_unsplit=config.compile.enabled,
                cuts_inputs=config.activations.partition,
                num_sharing=zero.num_sharing,
            )
        budget = Budget(step=memory, batch=step.microbatch)
    precision.attach(norm=gradients.norm, zero=zero, scales_itself=not is_microbatched)
    guard = BatchGuard(config.batch, mesh, device)
    buffers = SharedBuffers(module, mesh, device)
    return ParallelModel(
        plan=plan,
        zero=zero,
        gradients=gradients,
        guard=guard,
        buffers=buffers,
        router=router,
        runner=runner,
        randomness=randomness,
        heads=heads,
        losses=losses,
        compiling=compiling,
        keep_little=keep_little,
        budget=budget,
    )


def _compiled_by(config: CompileConfig, mesh: Mesh, wait: Wait) -> Callable[[nn.Module], Dense | None]:
    if not config.enabled:
        return lambda block: None
    return DenseCompiler(config, is_costly, wait, whole, is_telling=mesh.dp_rank == 0 and mesh.coordinate.tp == 0).of


def _let_meet(blocks: Iterable[nn.Module], mesh: Mesh, rendezvous: Rendezvous) -> None:
    """Let the ranks that share weights of a block meet before calls of it between steps."""
    for block in blocks:
        axes = ("dp_shard", "tp") if isinstance(block, FSDPModule) else ("tp",)
        ranks = mesh.sliced(*axes).mesh.flatten().tolist()
        if len(ranks) > 1 and holds_parts(block):
            running(block).meet = partial(rendezvous.meet, ranks)


def _keep_little(
    own: Mapping[str, nn.Module],
    config: ThreeDConfig,
    mesh: Mesh,
    device: torch.device,
    offload: Offload | None,
    unsplit: set[int],
    plan: Plan,
) -> None:
    """Let this rank's blocks be computed again in their backwards, and offload what they keep, as planned."""
    generators = Generators(device)
    keep = KeptTensor if offload is None else offload.keep
    inputs = PartitionedInputs(mesh.group("tp"), keep).kept if config.activations.partition else nullcontext
    unsplit.clear()
    unsplit.update(range(plan.num_stages) if config.compile.enabled else plan.recomputing_stages)
    for block in plan.blocks:
        if block.fqn not in own:
            continue
        recomputed = None
        if block.recompute != "none":
            recomputed = Recomputation(block.fqn, own[block.fqn], block.recompute, generators, whole, inputs, keep)
        runner = running(own[block.fqn])
        is_left = config.compile.enabled and block.recompute == "selective"  # to the compiler
        runner.recomputed, runner.recomputed_eagerly = (None, recomputed) if is_left else (recomputed, None)
        runner.offloaded = None
        if offload is not None and block.is_offloaded:
            runner.offloaded = partial(offload.call, block.fqn, own[block.fqn])


def _pipeline_stages(plan: Plan, blocks: Mapping[str, nn.Module]) -> dict[nn.Parameter, int]:
    """Parameters whose gradients the backward of one pipeline stage alone makes -> that stage."""
    stages: dict[nn.Parameter, set[int]] = {}
    for block in plan.blocks:
        for parameter in blocks[block.fqn].parameters():
            stages.setdefault(parameter, set()).update(block.stages)
    return {parameter: next(iter(of_blocks)) for parameter, of_blocks in stages.items() if len(of_blocks) == 1}
