"""Deciding the plan of a model by pure functions of what was observed of it: no collectives and no process groups.

Sizes are ints, so a plan for any number of ranks can be made in one process.
"""

from __future__ import annotations

import torch
from torch import nn

from lightning_3d.activations.chosen_blocks import chosen_blocks
from lightning_3d.config.activations import Mode
from lightning_3d.config.settings import ThreeDConfig
from lightning_3d.distributed.mesh import MeshShape
from lightning_3d.model.blocks import num_parameters
from lightning_3d.planning.assignment import assign_stages
from lightning_3d.planning.observer import Observation
from lightning_3d.planning.plan import BlockPlan, Plan
from lightning_3d.planning.state_places import find_ties, place_state, used_by_glue
from lightning_3d.planning.tensor_blocks import plan_blocks
from lightning_3d.tensor.plan.block_plan import BlockTensorPlan
from lightning_3d.torch_internals.modules import BatchNorm


def decide(observed: Observation, config: ThreeDConfig, shape: MeshShape, device: torch.device) -> Plan:
    """Shard the weights of blocks, and assign blocks to stages by what they take then.

    Args:
        device: Where blocks will run.

    Raises:
        PlanError: no layout of this model fits the mesh.
    """
    module, blocks, trace = observed.module, observed.blocks, observed.trace
    tensors = dict[str, BlockTensorPlan]()
    if trace is not None and shape.tp > 1:
        tensors = plan_blocks(module, blocks, trace, config.tensor, shape.tp)
    stage_ranks = config.pipeline.stage_ranks(shape.pp)
    assignment = assign_stages(observed, tensors, config, shape, device)
    stages = assignment.stages_of_calls
    order = sorted(blocks, key=lambda fqn: stages[fqn][0])
    activations = config.activations
    mode: Mode = "none" if activations.recompute == "auto" else activations.recompute
    chosen = chosen_blocks({fqn: blocks[fqn] for fqn in order}, activations)
    ranks = {fqn: {stage_ranks[stage] for stage in of_calls} for fqn, of_calls in stages.items()}
    return Plan(
        shape=shape,
        zero_stage=config.zero.stage,
        schedule=config.pipeline.schedule,
        num_microbatches=config.num_microbatches,
        loss=config.pipeline.loss,
        blocks=tuple(
            BlockPlan(
                fqn=fqn,
                kind=type(blocks[fqn]).__name__,
                num_parameters=num_parameters(blocks[fqn]),
                stages=stages[fqn],
                tensor=tensors.get(fqn),
                recompute=mode if fqn in chosen else "none",
                is_offloaded=activations.offload and fqn in chosen,
            )
            for fqn in order
        ),
        stages=assignment.stages,
        load_unit=assignment.unit,
        stage_ranks=stage_ranks,
        state_ranks=place_state(module, blocks, ranks, trace if observed.inline is None else None, range(shape.pp)),
        ties=find_ties(module),
        used_by_glue=used_by_glue(trace),
        inline=observed.inline,
        has_side_effects=trace is not None and trace.has_side_effects,
        batch_norms=tuple(fqn for fqn, inner in module.named_modules() if _normalises_alone(inner)),
    )


def _normalises_alone(module: nn.Module) -> bool:
    """Whether it is a BatchNorm that is trained, without communication."""
    return isinstance(module, BatchNorm) and module.training and not isinstance(module, nn.SyncBatchNorm)
