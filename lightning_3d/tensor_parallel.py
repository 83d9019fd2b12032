"""Tensor parallel for the blocks of a plan: find each block's sharding, prove it, carry it out."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Hashable, Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils._pytree import tree_map

from lightning_3d.config import TensorConfig
from lightning_3d.mesh import Mesh
from lightning_3d.pipeline.ghost import TensorMeta
from lightning_3d.pipeline.trace import Trace
from lightning_3d.plan import Plan
from lightning_3d.state import named_state
from lightning_3d.tensor import (
    BlockTensorPlan,
    Verification,
    apply_block,
    block_signature,
    check_roles,
    plan_block,
    replicated_plan,
    roles_by_hand,
    verify_block,
)


def plan_blocks(
    plan: Plan, module: nn.Module, blocks: Mapping[str, nn.Module], trace: Trace, config: TensorConfig
) -> Plan:
    """Give every block its sharding. Blocks that are alike are planned once.

    Raises:
        PlanError: a rule of ``config.plan`` names nothing or can't be followed.
    """
    excluded = _shared(plan, module)
    by_hand = roles_by_hand(config.plan, module, blocks)
    found: dict[Hashable, BlockTensorPlan] = {}
    sharded = []
    for block_plan in plan.blocks:
        block = blocks[block_plan.fqn]
        if block_plan.fqn not in trace.block_inputs:
            reason = f"{block_plan.fqn} was not called in the traced step"
            sharded.append(replace(block_plan, tensor=replicated_plan(block, size=plan.shape.tp, reason=reason)))
            continue
        args, kwargs = trace.block_inputs[block_plan.fqn]
        roles = by_hand.get(block_plan.fqn, {})
        key = (_kind_of(block, excluded), tuple(roles.items()), repr((args, kwargs)))
        if key not in found:
            args, kwargs = _examples((args, kwargs))
            found[key] = plan_block(block, args, kwargs, size=plan.shape.tp, excluded=excluded, by_hand=roles)
        check_roles(found[key], roles, block_plan.fqn)
        sharded.append(replace(block_plan, tensor=found[key]))
    return replace(plan, blocks=tuple(sharded))


def prove_blocks(
    plan: Plan, module: nn.Module, blocks: Mapping[str, nn.Module], trace: Trace, mesh: Mesh, config: TensorConfig
) -> Plan:
    """Compare every distinct sharded block of this rank's stage with its dense self; every rank calls it.

    Returns:
        The plan without the shardings that did not prove out, the same on all ranks; each is warned of.
    """
    excluded = _shared(plan, module)
    proofs: dict[Hashable, Verification] = {}
    failed: dict[str, str] = {}
    for block_plan in plan.blocks_on(mesh.pp_rank):
        block = blocks[block_plan.fqn]
        if block_plan.tensor is None or not block_plan.tensor.is_sharded:
            continue
        key = block_signature(block, block_plan.tensor)
        if key not in proofs:
            args, kwargs = _examples(trace.block_inputs[block_plan.fqn])
            proofs[key] = verify_block(
                block,
                block_plan.tensor,
                args,
                kwargs,
                mesh.axis("tp"),
                tolerance=None if config.verify_tolerance == "auto" else config.verify_tolerance,
                excluded=excluded,
            )
        if not proofs[key].passed:
            failed[block_plan.fqn] = str(proofs[key])
    everyone: list[dict[str, str]] = [{}] * mesh.shape.world_size
    dist.all_gather_object(everyone, failed)
    failed = {fqn: why for part in everyone for fqn, why in part.items()}
    if failed and dist.get_rank() == 0:
        listed = "; ".join(f"{fqn}: {why}" for fqn, why in failed.items())
        warnings.warn(
            f"Tensor parallel is left out of blocks whose sharding differs from dense: {listed}", stacklevel=2
        )
    return replace(
        plan,
        blocks=tuple(
            replace(b, tensor=replicated_plan(blocks[b.fqn], size=plan.shape.tp, reason=failed[b.fqn]))
            if b.fqn in failed
            else b
            for b in plan.blocks
        ),
    )


def apply_blocks(plan: Plan, module: nn.Module, blocks: Mapping[str, nn.Module], mesh: Mesh) -> None:
    """Shard the blocks of this rank's stage."""
    excluded = _shared(plan, module)
    for block_plan in plan.blocks_on(mesh.pp_rank):
        if block_plan.tensor is not None and block_plan.tensor.is_sharded:
            apply_block(blocks[block_plan.fqn], block_plan.tensor, mesh.axis("tp"), excluded=excluded)


def _shared(plan: Plan, module: nn.Module) -> list[nn.Parameter]:
    """Parameters that code outside their block uses too; they stay plain."""
    shared = plan.ties.keys() | plan.used_by_glue
    return [tensor for fqn, tensor, _ in named_state(module) if fqn in shared and isinstance(tensor, nn.Parameter)]


def _kind_of(block: nn.Module, excluded: Collection[nn.Parameter]) -> Hashable:
    """Blocks of one kind get the same plan for the same inputs."""
    shared = {id(parameter) for parameter in excluded}
    parameters = tuple(
        (fqn, tuple(p.shape), p.dtype, p.requires_grad, id(p) in shared) for fqn, p in block.named_parameters()
    )
    return type(block), repr(block), parameters


def _examples(inputs: Any) -> Any:
    def example(leaf: Any) -> Any:
        if not isinstance(leaf, TensorMeta):
            return leaf
        return torch.empty(leaf.shape, dtype=leaf.dtype, device="meta", requires_grad=leaf.requires_grad)

    return tree_map(example, inputs)
