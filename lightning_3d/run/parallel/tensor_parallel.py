"""Carrying out the tensor-parallel part of a plan: prove each block's sharding, then shard the blocks."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial

import torch
import torch.distributed as dist
from torch import nn

from lightning_3d.config.tensor import TensorConfig
from lightning_3d.distributed.agreement import raise_on_all_ranks
from lightning_3d.distributed.mesh import Mesh
from lightning_3d.distributed.rng import Generators
from lightning_3d.model.block_runner import Compiled
from lightning_3d.model.initial_weights import move_parameters, put_back
from lightning_3d.model.kinds import identity_of
from lightning_3d.model.snapshot import preserved
from lightning_3d.planning.observer import Observation
from lightning_3d.planning.plan import Plan
from lightning_3d.planning.tensor_blocks import example_inputs, excluded_parameters, over_vocabulary, parameters_of
from lightning_3d.run.context import RunContext
from lightning_3d.run.decide.plan_model import Planned
from lightning_3d.sharding.axis import MeshAxis
from lightning_3d.tensor import Verification, apply_block, replicated_plan, verify_block
from lightning_3d.tensor.vocabulary.fused_heads import FusedHeads, HeadPlan
from lightning_3d.torch_internals.modules import named_state
from lightning_3d.trace.fake_blocks import random_like
from lightning_3d.trace.ghost import TensorMeta
from lightning_3d.waits import long_wait
from lightning_3d.zero.fully_sharded import is_shardable


def shard_blocks(
    planned: Planned, blocks: Mapping[str, nn.Module], compiled: Callable[[nn.Module], Compiled | None]
) -> Plan:
    """Shard the blocks whose plans prove out, on other weights while the model has none; every rank calls it.

    Returns:
        The plan, which says which.
    """
    context, plan = planned.context, planned.plan
    module, mesh, device, config = context.module, context.mesh, context.device, context.config
    if mesh.shape.tp > 1:
        warn_of_whole_sequences(plan)
        # The user's code that runs before training draws no numbers of it, and modules beside blocks keep nothing.
        with Generators(device).preserved(), context.precision.dtype_of_steps(), preserved(module):
            if config.tensor.verify:
                observed, is_empty = planned.observed, planned.built.is_empty
                plan = prove_blocks(plan, observed, mesh, config.tensor, device, compiled, is_empty)
        apply_blocks(plan, module, blocks, mesh, device)
    # FSDP2 takes those that it shards unit by unit.
    is_fully_sharded = config.zero.is_fully_sharded(mesh.shape.size("state"))
    move_parameters(module, {p for p in module.parameters() if not (is_fully_sharded and is_shardable(p))}, device)
    return plan


def fused_heads(context: RunContext, plan: Plan, blocks: Mapping[str, nn.Module]) -> FusedHeads:
    """The heads that may run with their losses; on slices of sequences those whose classes are whole."""
    is_on, cuts_sequences = context.config.activations.fused_loss == "auto", context.mesh.shape.cp > 1
    planned = {
        block.fqn: (
            blocks[block.fqn],
            HeadPlan(tensor=block.tensor, is_recomputed=block.is_recomputed, is_offloaded=block.is_offloaded),
        )
        for block in plan.blocks
        if is_on and not (cuts_sequences and block.tensor is not None and block.tensor.is_sharded)
    }
    tp = context.mesh.ranks("tp")
    sync_check = partial(context.rendezvous.sync_check, tp, in_steps=True)
    return FusedHeads(planned, MeshAxis(context.mesh.axis("tp")) if len(tp) > 1 else None, sync_check)


def prove_blocks(
    plan: Plan,
    observed: Observation,
    mesh: Mesh,
    config: TensorConfig,
    device: torch.device,
    compiled: Callable[[nn.Module], Compiled | None],
    is_empty: bool = False,
) -> Plan:
    """Compare every distinct sharded block with its dense self, each rank those of its stage; every rank calls it.

    Args:
        observed: The plan's blocks, traced.
        device: Where a block's weights are moved to for its proof.
        compiled: As for `verify_block`, as what runs will be compiled.
        is_empty: Whether there are none yet, so that random ones take their place for that.

    Returns:
        The same plan on all ranks, in which blocks that did not prove out are replicated; each is warned of.
    """
    failed = _failures(plan, observed, mesh, config, device, compiled, is_empty)
    if failed:
        failed = _with_partners(failed, plan)
        _warn("Tensor parallel is left out of blocks whose sharding differs from dense", failed)
    blocks = observed.blocks
    replicated = {fqn: replicated_plan(blocks[fqn], size=plan.shape.tp, reason=why) for fqn, why in failed.items()}
    return plan.with_blocks(lambda block: replace(block, tensor=replicated.get(block.fqn, block.tensor)))


def _failures(
    plan: Plan,
    observed: Observation,
    mesh: Mesh,
    config: TensorConfig,
    device: torch.device,
    compiled: Callable[[nn.Module], Compiled | None],
    is_empty: bool,
) -> dict[str, str]:
    """FQN -> plan and difference, on all ranks, for those blocks that do not prove out."""
    assert observed.trace is not None
    inputs = observed.trace.block_inputs
    proofs: dict[Hashable, Verification] = {}
    failed: dict[str, str] = {}
    own = plan.blocks_on(mesh.pp_rank)
    for number, block_plan in enumerate(own, 1):
        tensor, fqn = block_plan.tensor, block_plan.fqn
        if tensor is None or not tensor.is_sharded or fqn not in inputs:
            continue
        block = observed.blocks[fqn]
        key = identity_of(fqn, block), tensor
        if key not in proofs:
            args, kwargs = example_inputs(inputs[fqn], TensorMeta.as_seen)
            with long_wait(f"Proving {fqn}, block {number} of {len(own)}"), ExitStack() as moved:
                with raise_on_all_ranks(mesh.axis("tp").get_group()):
                    moved.enter_context(_on_device(observed.module, block, device, is_empty))
                proofs[key] = verify_block(
                    block,
                    tensor,
                    args,
                    kwargs,
                    mesh.axis("tp"),
                    tolerance=None if config.verify_tolerance == "auto" else config.verify_tolerance,
                    excluded=excluded_parameters(plan, observed.module),
                    compiled=compiled,
                )
        if not proofs[key].passed:
            failed[fqn] = f"{proofs[key]} ({tensor.summary})"
    everyone: list[dict[str, str]] = [{}] * mesh.shape.world_size
    with long_wait("Proving blocks of other stages"):
        dist.all_gather_object(everyone, failed)
    return {fqn: why for part in everyone for fqn, why in part.items()}


def warn_of_whole_sequences(plan: Plan) -> None:
    """Tell of blocks that could be sharded, and not along their sequence, though that is asked for."""
    sharded = {block.fqn: block.tensor for block in plan.blocks if block.tensor is not None and block.tensor.is_sharded}
    reasons = {fqn: why for fqn, tensor in sharded.items() if (why := tensor.not_sequence_parallel) is not None}
    if reasons:
        _warn("Sequence parallelism is left out of blocks", reasons)


def _warn(what: str, reasons: Mapping[str, str]) -> None:
    if dist.get_rank() == 0:
        names: dict[str, list[str]] = {}
        for fqn, why in reasons.items():
            names.setdefault(why, []).append(fqn)
        listed = "; ".join(f"{', '.join(fqns)}: {why}" for why, fqns in names.items())
        warnings.warn(f"{what}: {listed}", stacklevel=3)


@contextmanager
def _on_device(module: nn.Module, block: nn.Module, device: torch.device, is_empty: bool) -> Iterator[None]:
    """Have a block's parameters on a device inside."""
    before = {parameter: parameter.data for parameter in block.parameters()}
    if is_empty:
        torch.manual_seed(0)
        for parameter in before:
            parameter.data = random_like(parameter, device)
    moved = move_parameters(module, before.keys(), device)
    try:
        yield
    finally:
        put_back(module, moved)
        for parameter, data in before.items():
            parameter.data = data


def apply_blocks(
    plan: Plan,
    module: nn.Module,
    blocks: Mapping[str, nn.Module],
    mesh: Mesh,
    device: torch.device,
) -> None:
    """Shard the blocks of this rank's stage.

    Args:
        device: Where a block's weights are moved to, before this rank takes its shards.
    """
    excluded, tied = excluded_parameters(plan, module), set(parameters_of(module, plan.ties))
    made: dict[nn.Parameter, nn.Parameter] = {}
    for block_plan in plan.blocks_on(mesh.pp_rank):
        if block_plan.tensor is not None and block_plan.tensor.is_sharded:
            block = blocks[block_plan.fqn]
            if move_parameters(module, set(block.parameters()) - made.keys(), device):
                excluded, tied = excluded_parameters(plan, module), set(parameters_of(module, plan.ties))
            tp = mesh.axis("tp")
            apply_block(block, block_plan.tensor, tp, excluded=excluded, made=made)
            made = {parameter: new for parameter, new in made.items() if parameter in tied}
    for fqn, tensor, owner in list(named_state(module)):  # also where blocks of other stages share it
        if isinstance(tensor, nn.Parameter) and tensor in made:
            setattr(owner, fqn.rpartition(".")[2], made[tensor])


def _with_partners(failed: Mapping[str, str], plan: Plan) -> dict[str, str]:
    """These blocks and all that share weights with them that are sharded over the vocabulary."""
    names = {block.fqn: {plan.ties.get(fqn, fqn) for fqn in over_vocabulary(block)} for block in plan.blocks}
    every = dict(failed)
    while partners := [
        (fqn, other) for fqn in names for other in every if fqn not in every and names[fqn] & names[other]
    ]:
        every.update((fqn, f"shares a weight with {other}") for fqn, other in partners)
    return every
