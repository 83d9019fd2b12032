"""The pipeline's part of a plan: this rank gets the weights of its stages."""

from __future__ import annotations

from functools import partial

import torch

from lightning_3d.model.initial_weights import place_weights
from lightning_3d.planning.plan import Plan
from lightning_3d.run.context import RunContext
from lightning_3d.torch_internals.lightning_helpers import set_device
from lightning_3d.zero.fully_sharded import lay_out_contiguously


def place_stages(context: RunContext, plan: Plan) -> None:
    """Give this rank the weights of its stages; those of others are dropped."""
    module, mesh, device = context.module, context.mesh, context.device
    is_fully_sharded = context.config.zero.is_fully_sharded(mesh.shape.size("state"))
    if is_fully_sharded:
        lay_out_contiguously(module)
    is_by_block = is_fully_sharded or mesh.shape.tp > 1  # that come to the device one after the other
    first = torch.device("cpu") if is_by_block else device
    place_weights(module, partial(plan.holds, mesh.pp_rank), device, parameters_on=first)
    set_device(module, device=device)
