"""Making a planned model parallel: each part of the plan once, in order, a file each.

place     this rank's stages get their weights             stages.py
shard     blocks become shards, after a proof of each      tensor_parallel.py
share     ZeRO takes parameters, gradients and states      zero.py, offload.py
keep      what blocks keep for their backward              activations.py
run       the engine of microbatches, or inline steps      runner.py
answer    the model knows which parts of it are here       here
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from lightning_3d.compile.blocks import BlockCompiler
from lightning_3d.data.batch_guard import BatchGuard
from lightning_3d.distributed.agreement import on_one_rank
from lightning_3d.distributed.rng import StepRandomness
from lightning_3d.model.block_runner import Compiled, running
from lightning_3d.parts.copies import copies_of, lay_out_copies
from lightning_3d.parts.layout import Layout, shard_layout
from lightning_3d.parts.module import answer_for_parts, holds_parts
from lightning_3d.parts.references import follow
from lightning_3d.parts.stages import PipelineStages
from lightning_3d.planning.budget import Budget
from lightning_3d.planning.plan import Plan
from lightning_3d.planning.step_memory import StepMemory
from lightning_3d.run.context import RunContext
from lightning_3d.run.decide.plan_model import Planned
from lightning_3d.run.parallel.activations import BlockCheckpointing
from lightning_3d.run.parallel.parallel_model import ParallelModel
from lightning_3d.run.parallel.runner import make_runner, ranks_with_model
from lightning_3d.run.parallel.shared_buffers import SharedBuffers
from lightning_3d.run.parallel.stages import place_stages
from lightning_3d.run.parallel.tensor_parallel import fused_heads, shard_blocks
from lightning_3d.run.parallel.zero import share_state
from lightning_3d.tensor.vocabulary.lazy_tensor import made
from lightning_3d.torch_internals.lightning_helpers import callbacks_of
from lightning_3d.torch_internals.pytree import tree_map
from lightning_3d.trace.interception import Router
from lightning_3d.waits import CountedWait, long_wait
from lightning_3d.zero.engine import Zero
from lightning_3d.zero.fully_sharded import FullySharded
from lightning_3d.zero.gradients import Gradients


def make_parallel(planned: Planned) -> ParallelModel:
    """Carry out what a plan says of this rank; every rank calls it."""
    context, built = planned.context, planned.built
    module, mesh, device, config = context.module, context.mesh, context.device, context.config
    blocks, compiling = planned.plan.blocks_in(module), CountedWait()
    compiled = _compiled(context, compiling)
    with long_wait("Placing weights"):
        place_stages(context, planned.plan)
    plan = shard_blocks(planned, blocks, compiled)
    own = {block.fqn: blocks[block.fqn] for block in plan.blocks_on(mesh.pp_rank)}
    router = Router(blocks, absent=blocks.keys() - own.keys(), compiled=compiled)
    zero = share_state(context, plan, blocks)
    checkpointing = BlockCheckpointing(own, config, mesh, device)
    checkpointing.apply(plan)
    _let_meet(context, own.values())
    heads = fused_heads(context, plan, blocks)
    randomness = StepRandomness(
        seed=on_one_rank(torch.initial_seed),
        replica=mesh.dp_rank if config.samples_per_step is None else 0,
        is_alone=mesh.shape.size("samples") == 1 and config.samples_per_step is None,
        device=device,
    )
    gradients = Gradients(module, zero, plan.state_ranks, mesh, device)
    return ParallelModel(
        built=built,
        plan=plan,
        zero=zero,
        gradients=gradients,
        guard=BatchGuard(config.batch, mesh, device),
        buffers=SharedBuffers(module, mesh, device),
        router=router,
        runner=make_runner(
            context, plan, blocks, router, zero, gradients, randomness, heads, checkpointing.full_backward_stages
        ),
        randomness=randomness,
        heads=heads,
        apply_checkpointing=checkpointing.apply,
        budget=_budget(planned, plan),
        compiling=compiling,
        layout=_laid_out(planned, plan, zero),
        is_empty=built.is_empty,
    )


def _compiled(context: RunContext, compiling: CountedWait) -> Callable[[nn.Module], Compiled | None]:
    """Gives the compiled form of a block, if that is wanted."""
    mesh, config = context.mesh, context.config.compile
    if not config.enabled:
        return lambda block: None
    is_telling = mesh.dp_rank == 0 and mesh.coordinate.tp == 0
    return BlockCompiler(config, mesh.axis("tp"), compiling, made, is_telling=is_telling).of


def _let_meet(context: RunContext, own: Iterable[nn.Module]) -> None:
    """Let the ranks that share weights of a block meet before its calls, in steps too if they have the same samples."""
    for block in own:
        running(block).read = partial(tree_map, made)
        is_unit = isinstance(block, FSDPModule)
        ranks = context.mesh.ranks(*(("dp_shard", "tp") if is_unit else ("tp",)))
        if len(ranks) > 1 and holds_parts(block):
            running(block).sync_check = partial(context.rendezvous.sync_check, ranks, in_steps=not is_unit)


def _budget(planned: Planned, plan: Plan) -> Budget | None:
    """The memory that the traced step takes, where it is to be planned."""
    observed, config = planned.observed, planned.context.config
    if observed.step.name != "training_step" or not config.activations.plans_memory:
        return None
    step = StepMemory(observed, plan.tensors, config, plan.shape, planned.context.device)
    return Budget(step=step, batch=observed.step.microbatch)


def _laid_out(planned: Planned, plan: Plan, zero: Zero) -> Layout:
    """Let the model, and copies of it that callbacks hold, answer for the parts that this rank has of them."""
    context = planned.context
    module, mesh, device, met = context.module, context.mesh, context.device, context.rendezvous
    copies: list[nn.Module] = []
    if mesh.shape.is_model_parallel or isinstance(zero, FullySharded):
        copies = copies_of(module, callbacks_of(context.trainer))
        lay_out_copies(copies, module, device)
    ranks = ranks_with_model(mesh, zero)
    stages = PipelineStages(plan=plan, mesh=mesh, device=device, ranks=ranks, rendezvous=met)
    for each in (module, *copies):
        answer_for_parts(each, met, stages, model=module)
    layout = Layout(module, mesh, device, copies)
    shard_layout(layout)
    now = dict(module.named_parameters(remove_duplicate=False))
    follow(module, {before: now[fqn] for before, fqn in planned.built.names.items() if fqn in now})
    return layout
