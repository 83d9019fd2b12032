"""Deciding: a pure function of what was observed, the config and the mesh shape. It neither communicates nor changes
the model.
"""

from __future__ import annotations

import torch

from lightning_3d.config.settings import ThreeDConfig
from lightning_3d.distributed.mesh import MeshShape
from lightning_3d.planning.observation import Observation
from lightning_3d.planning.plan import Plan, make_plan
from lightning_3d.planning.tensor_blocks import plan_blocks


def decide(observed: Observation, config: ThreeDConfig, shape: MeshShape, device: torch.device) -> Plan:
    """Assign blocks to stages and shard their weights.

    Args:
        device: Where blocks are measured, if the partition method asks for it.

    Raises:
        PlanError: no layout of this model fits the mesh.
    """
    with observed.step.modes():
        plan = make_plan(observed.module, observed.blocks, observed.trace, config, shape, device)
    if observed.trace is None or shape.tp == 1:
        return plan
    return plan_blocks(plan, observed.module, observed.blocks, observed.trace, config.tensor)
