"""The steps' part of a plan: in microbatches through the stages, inline, or at once."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from lightning_3d.context.axis import ContextAxis
from lightning_3d.context.steps import ContextSteps
from lightning_3d.distributed.mesh import Mesh
from lightning_3d.distributed.rng import StepRandomness
from lightning_3d.model.block_runner import running
from lightning_3d.pipeline.engine import PipelineEngine
from lightning_3d.pipeline.inline.between_steps import CallsBetweenSteps
from lightning_3d.pipeline.inline.exchange import Exchange
from lightning_3d.pipeline.inline.step import InlineStep
from lightning_3d.planning.inline_mode import is_microbatched
from lightning_3d.planning.plan import Plan
from lightning_3d.run.context import RunContext
from lightning_3d.run.step.inline_fallback import InlineFallback
from lightning_3d.run.step.step_runner import PipelineRunner, StepRunner, WholeModelRunner
from lightning_3d.tensor.vocabulary.fused_heads import FusedHeads
from lightning_3d.trace.interception import Router
from lightning_3d.zero.engine import Zero
from lightning_3d.zero.fully_sharded import FullySharded
from lightning_3d.zero.gradients import Gradients


def make_runner(
    context: RunContext,
    plan: Plan,
    blocks: Mapping[str, nn.Module],
    router: Router,
    zero: Zero,
    gradients: Gradients,
    randomness: StepRandomness,
    heads: FusedHeads,
    full_backward_stages: set[int],
) -> StepRunner:
    """Make what runs the steps of a model on this rank.

    Args:
        blocks: FQN -> block, of all stages.
        full_backward_stages: Stages whose backward stays in one piece; may change until a step runs.
    """
    module, mesh, config, precision = context.module, context.mesh, context.config, context.precision
    precision.attach(norm=gradients.norm, zero=zero)
    inline = _inline(context, plan, blocks, router, zero) if mesh.shape.pp > 1 else None
    if not is_microbatched(config, mesh.shape):
        slices = _context(context, plan, blocks) if inline is None else None  # inline, all ranks run all of it
        return WholeModelRunner(module, zero, randomness, heads, inline, slices)
    engine = PipelineEngine(
        module=module,
        rank_module=zero.root,
        router=router,
        plan=plan,
        mesh=mesh,
        randomness=randomness,
        device=context.device,
        around_backward=zero.stage_backward,
        full_backward_stages=full_backward_stages,
        has_budget=config.activations.plans_memory,
        sit_out=lambda fqns: zero.sit_out([blocks[fqn] for fqn in fqns]),
        context=_context(context, plan, blocks),
        shares_evaluations=isinstance(zero, FullySharded),
    )
    assert inline is not None
    of_blocks = {parameter for block in blocks.values() for parameter in block.parameters()}
    return PipelineRunner(
        module,
        zero,
        engine,
        gradients,
        mode=config.pipeline.mode,
        fallback=InlineFallback(module, zero, gradients, randomness, inline, of_blocks, precision),
        splits_backward=config.pipeline.splits_backward,
        precision=precision,
        heads=heads,
    )


def _context(context: RunContext, plan: Plan, blocks: Mapping[str, nn.Module]) -> ContextSteps | None:
    """Let steps run on slices of sequences, where ranks share them."""
    if context.mesh.shape.cp == 1:
        return None
    axis = ContextAxis(context.mesh.axis("cp"))
    of_plan = {block.fqn: blocks[block.fqn] for block in plan.blocks}
    config, cuts_features = context.config.context, context.mesh.shape.tp > 1
    return ContextSteps(context.module, of_plan, axis, config, cuts_features=cuts_features)


def _inline(context: RunContext, plan: Plan, blocks: Mapping[str, nn.Module], router: Router, zero: Zero) -> InlineStep:
    """Let calls of blocks, between steps and in those that run inline, come to where their weights are."""
    mesh = context.mesh
    homes = {block.fqn: plan.stage_ranks[block.stages[0]] for block in plan.blocks}
    has_collectives = isinstance(zero, FullySharded) or mesh.shape.tp > 1
    exchange = Exchange(mesh, context.device, has_collectives=has_collectives)
    inline = InlineStep(context.module, router, exchange, homes)
    calls = CallsBetweenSteps(
        inline,
        ranks_with_model(mesh, zero),
        context.rendezvous,
        zero.root.around,
        has_backward=plan.inline is not None,
    )
    for fqn in homes:
        running(blocks[fqn]).pipeline_exchange = calls.run
    return inline


def ranks_with_model(mesh: Mesh, zero: Zero) -> list[int]:
    """The ranks that have the model among them, with this one."""
    shared = ("pp", "dp_shard", "tp") if isinstance(zero, FullySharded) else ("pp", "tp")
    return sorted(mesh.ranks(*shared))
