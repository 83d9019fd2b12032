"""ZeRO's part of a plan: replicas share the training state."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from lightning_3d.planning.inline_mode import is_microbatched
from lightning_3d.planning.plan import Plan
from lightning_3d.run.context import RunContext
from lightning_3d.run.parallel.offload import offload_parameters, offload_policy
from lightning_3d.zero.engine import Zero
from lightning_3d.zero.fully_sharded import FullySharded
from lightning_3d.zero.plain_parameters import PlainParameters


def share_state(context: RunContext, plan: Plan, blocks: Mapping[str, nn.Module]) -> Zero:
    """Share the training state between the replicas; every rank calls it."""
    module, mesh, config = context.module, context.mesh, context.config.zero
    in_microbatches = is_microbatched(context.config, mesh.shape)
    if not config.is_fully_sharded(mesh.shape.size("state")):
        stages = _pipeline_stages(plan, blocks) if in_microbatches else {}
        pp_ranks = {parameter: plan.state_ranks[fqn] for fqn, parameter in module.named_parameters()}
        return PlainParameters(module, mesh=mesh, config=config, pipeline_stages=stages, pp_ranks=pp_ranks)
    zero = FullySharded(
        module,
        mesh=mesh,
        config=config,
        chains=[[blocks[block.fqn] for block in plan.blocks_of(i)] for i in plan.stages_on(mesh.pp_rank)],
        offload=offload_policy(config.offload_params, context.device),
        device=context.device,
        optimizes_manually=not module.automatic_optimization,
        keeps=config.keeps_gathered(is_microbatched=in_microbatches),
        casts_to=None if context.config.compile.enabled else context.precision.casts_to,
    )
    zero.parameter_store = offload_parameters(config.offload_params, zero.root)
    return zero


def _pipeline_stages(plan: Plan, blocks: Mapping[str, nn.Module]) -> dict[nn.Parameter, int]:
    """Parameters whose gradients the backward of one pipeline stage alone makes -> that stage."""
    stages: dict[nn.Parameter, set[int]] = {}
    for block in plan.blocks:
        for parameter in blocks[block.fqn].parameters():
            stages.setdefault(parameter, set()).update(block.stages)
    return {parameter: next(iter(of_blocks)) for parameter, of_blocks in stages.items() if len(of_blocks) == 1}
