"""Tensor parallel for the blocks of a plan: find each block's sharding, prove it, carry it out."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Hashable, Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from lightning_3d.config.settings import TensorConfig
from lightning_3d.distributed.agreement import on_rank_zero
from lightning_3d.distributed.mesh import Mesh
from lightning_3d.model.named_state import named_state
from lightning_3d.model.pytrees import is_opaque
from lightning_3d.planning.plan import BlockPlan, Plan
from lightning_3d.tensor import (
    BlockCompiler,
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
from lightning_3d.tensor.plan.block_plan import Role
from lightning_3d.tensor.vocabulary.uses import VocabularyUse, WeightUse, find_vocabulary, with_vocabulary
from lightning_3d.torch_internals.pytree import tree_map
from lightning_3d.trace.ghost import TensorMeta
from lightning_3d.trace.sharded_logits import find_logits
from lightning_3d.trace.trace import Trace
from lightning_3d.trace.unread_outputs import unread_outputs


def plan_blocks(
    plan: Plan, module: nn.Module, blocks: Mapping[str, nn.Module], trace: Trace, config: TensorConfig
) -> Plan:
    """Give every block its sharding. Blocks that are alike are planned once.

    Raises:
        PlanError: a rule of ``config.plan`` names nothing or can't be followed.
    """
    excluded = _shared(plan, module)
    by_hand = roles_by_hand(config.plan, module, blocks)
    vocabulary = _find_vocabulary(plan, module, blocks, trace, by_hand)
    unread = unread_outputs(trace)
    found: dict[Hashable, BlockTensorPlan] = {}
    sharded = []
    for block_plan in plan.blocks:
        block = blocks[block_plan.fqn]
        if block_plan.fqn not in trace.block_inputs:
            reason = f"{block_plan.fqn} was not called in the traced step"
            rest = replicated_plan(block, size=plan.shape.tp, reason=reason)
            sharded.append(replace(block_plan, tensor=with_vocabulary(rest, vocabulary[block_plan.fqn])))
            continue
        args, kwargs = trace.block_inputs[block_plan.fqn]
        roles = by_hand.get(block_plan.fqn, {})
        use, leaves = vocabulary[block_plan.fqn], unread.get(block_plan.fqn, frozenset())
        key = (_kind_of(block, excluded), tuple(roles.items()), leaves, _described((use, args, kwargs)))
        if key not in found:
            args, kwargs = _examples((args, kwargs))
            rest = plan_block(
                block,
                args,
                kwargs,
                size=plan.shape.tp,
                excluded=[*excluded, *(block.get_parameter(fqn) for fqn in use.fqns)],
                by_hand={fqn: role for fqn, role in roles.items() if role != "vocabulary"},
                sequence_parallel=config.sequence_parallel and not use.fqns,
                unread=leaves,
            )
            found[key] = with_vocabulary(rest, use)
        check_roles(found[key], roles, block_plan.fqn)
        sharded.append(replace(block_plan, tensor=found[key]))
    return replace(plan, blocks=tuple(sharded))


def _find_vocabulary(
    plan: Plan,
    module: nn.Module,
    blocks: Mapping[str, nn.Module],
    trace: Trace,
    by_hand: Mapping[str, Mapping[str, Role]],
) -> Mapping[str, VocabularyUse]:
    """What each called block can shard over the vocabulary; of tied weights only those that all their blocks can."""
    logits = find_logits(trace)
    by_glue = _parameters(module, plan.used_by_glue)
    found: dict[str, VocabularyUse] = {}
    known: dict[Hashable, VocabularyUse] = {}
    for fqn, inputs in trace.block_inputs.items():
        roles = by_hand.get(fqn, {})
        key = (_kind_of(blocks[fqn], by_glue), tuple(roles.items()), _described(inputs), logits.get(fqn))
        if key not in known:
            args, kwargs = _examples(inputs)
            known[key] = find_vocabulary(
                blocks[fqn],
                args,
                kwargs,
                size=plan.shape.tp,
                logits=logits.get(fqn),
                excluded=by_glue,
                by_hand=roles,
            )
        found[fqn] = known[key]
    found.update({fqn: _idle(fqn, blocks[fqn], plan) for fqn in blocks if fqn not in found})
    return _agreed(found, plan, module, blocks, trace)


def _agreed(
    found: Mapping[str, VocabularyUse],
    plan: Plan,
    module: nn.Module,
    blocks: Mapping[str, nn.Module],
    trace: Trace,
) -> Mapping[str, VocabularyUse]:
    """Without tied weights that a block has found no such use for, or that no called block uses."""
    slots = {_slot(blocks[block], fqn) for block, use in found.items() for fqn in use.fqns}
    called = {plan.ties.get(f"{block}.{fqn}") for block in trace.block_inputs for fqn in found[block].fqns}
    apart = {root for fqn, root in plan.ties.items() if _slot(module, fqn) not in slots or root not in called}
    for block, use in found.items():  # a head's weight goes with its bias
        for bias, weight in use.biases.items():
            if plan.ties.get(f"{block}.{bias}") in apart and f"{block}.{weight}" in plan.ties:
                apart.add(plan.ties[f"{block}.{weight}"])
    return {
        block: use.without({fqn for fqn in use.fqns if plan.ties.get(f"{block}.{fqn}") in apart})
        for block, use in found.items()
    }


def _idle(fqn: str, block: nn.Module, plan: Plan) -> VocabularyUse:
    """Of a block that is not called: it takes part in what other blocks do to tied weights."""
    unused = WeightUse(lookup_bytes=(), head_input_bytes=(), logits_bytes=())
    names = [name for name, _ in block.named_parameters(remove_duplicate=False) if f"{fqn}.{name}" in plan.ties]
    return VocabularyUse(weights=dict.fromkeys(names, unused))


def _slot(module: nn.Module, fqn: str) -> tuple[nn.Module, str]:
    """Where a parameter hangs, whatever the names of its module."""
    owner, _, name = fqn.rpartition(".")
    return module.get_submodule(owner), name


def prove_blocks(
    plan: Plan,
    module: nn.Module,
    blocks: Mapping[str, nn.Module],
    trace: Trace,
    mesh: Mesh,
    config: TensorConfig,
    compiler: BlockCompiler | None,
) -> Plan:
    """Compare every distinct sharded block with its dense self, each rank those of its stage; every rank calls it.

    A compiler compiles what is compared as it will what runs.

    Returns:
        The same plan on all ranks, in which blocks that did not prove out have a safer sharding that does (without
        sequence parallelism), or none; each is warned of.
    """
    failed = _failures(plan, module, blocks, trace, mesh, config, compiler)
    safer = {b.fqn for b in plan.blocks if b.fqn in failed and b.tensor is not None and b.tensor.is_sequence_parallel}
    if safer:
        _warn("Sequence parallelism", {fqn: failed.pop(fqn) for fqn in sorted(safer)})
        device = torch.device(mesh.device_mesh.device_type)
        without = replace(config, sequence_parallel=False)
        plain = on_rank_zero(lambda: plan_blocks(plan, module, blocks, trace, without), device)
        plan = _with(plan, {b.fqn: b.tensor for b in plain.blocks if b.fqn in safer})
        failed |= _failures(plan, module, {fqn: blocks[fqn] for fqn in safer}, trace, mesh, config, compiler)
    if failed:
        failed = _with_partners(failed, plan)
        _warn("Tensor parallel", failed)
    left = {fqn: replicated_plan(blocks[fqn], size=plan.shape.tp, reason=why) for fqn, why in failed.items()}
    return _with(plan, left)


def _failures(
    plan: Plan,
    module: nn.Module,
    blocks: Mapping[str, nn.Module],
    trace: Trace,
    mesh: Mesh,
    config: TensorConfig,
    compiler: BlockCompiler | None,
) -> dict[str, str]:
    """FQN -> plan and difference, on all ranks, for those of ``blocks`` that do not prove out."""
    excluded = _shared(plan, module)
    proofs: dict[Hashable, Verification] = {}
    failed: dict[str, str] = {}
    for block_plan in plan.blocks_on(mesh.pp_rank):
        tensor, fqn = block_plan.tensor, block_plan.fqn
        if fqn not in blocks or tensor is None or not tensor.is_sharded or fqn not in trace.block_inputs:
            continue
        block = blocks[fqn]
        key = block_signature(block, tensor)
        if key not in proofs:
            args, kwargs = _examples(trace.block_inputs[fqn])
            proofs[key] = verify_block(
                block,
                tensor,
                args,
                kwargs,
                mesh.axis("tp"),
                tolerance=None if config.verify_tolerance == "auto" else config.verify_tolerance,
                excluded=excluded,
                compiler=compiler,
            )
        if not proofs[key].passed:
            failed[fqn] = f"{proofs[key]} ({tensor.summary})"
    everyone: list[dict[str, str]] = [{}] * mesh.shape.world_size
    dist.all_gather_object(everyone, failed)
    return {fqn: why for part in everyone for fqn, why in part.items()}


def _warn(what: str, failed: Mapping[str, str]) -> None:
    if dist.get_rank() == 0:
        listed = "; ".join(f"{fqn}: {why}" for fqn, why in failed.items())
        warnings.warn(f"{what} is left out of blocks whose sharding differs from dense: {listed}", stacklevel=3)


def _with(plan: Plan, tensor: Mapping[str, BlockTensorPlan | None]) -> Plan:
    """The plan with other shardings of some blocks, by FQN."""
    blocks = (replace(block, tensor=tensor.get(block.fqn, block.tensor)) for block in plan.blocks)
    return replace(plan, blocks=tuple(blocks))


def apply_blocks(
    plan: Plan, module: nn.Module, blocks: Mapping[str, nn.Module], mesh: Mesh, compiler: BlockCompiler | None
) -> None:
    """Shard the blocks of this rank's stage, and compile them if there is a compiler."""
    excluded, tied = _shared(plan, module), set(_parameters(module, plan.ties))
    made: dict[nn.Parameter, nn.Parameter] = {}
    for block_plan in plan.blocks_on(mesh.pp_rank):
        if block_plan.tensor is not None and block_plan.tensor.is_sharded:
            block = blocks[block_plan.fqn]
            tp = mesh.axis("tp")
            apply_block(block, block_plan.tensor, tp, excluded=excluded, made=made, compiler=compiler)
            made = {parameter: new for parameter, new in made.items() if parameter in tied}
    for fqn, tensor, owner in list(named_state(module)):  # also where blocks of other stages share it
        if isinstance(tensor, nn.Parameter) and tensor in made:
            setattr(owner, fqn.rpartition(".")[2], made[tensor])


def _with_partners(failed: Mapping[str, str], plan: Plan) -> dict[str, str]:
    """These blocks and all that share weights with them that are sharded over the vocabulary."""
    names = {block.fqn: {plan.ties.get(fqn, fqn) for fqn in _over_vocabulary(block)} for block in plan.blocks}
    every = dict(failed)
    while partners := [
        (fqn, other) for fqn in names for other in every if fqn not in every and names[fqn] & names[other]
    ]:
        every.update((fqn, f"shares a weight with {other}") for fqn, other in partners)
    return every


def _over_vocabulary(block: BlockPlan) -> set[str]:
    """FQNs of what is sharded over the vocabulary."""
    weights = () if block.tensor is None else block.tensor.weights
    return {f"{block.fqn}.{weight.fqn}" for weight in weights if weight.role == "vocabulary"}


def _shared(plan: Plan, module: nn.Module) -> list[nn.Parameter]:
    """Parameters that code outside their block uses too; they stay plain, but for those sharded over the vocabulary."""
    sharded = {plan.ties.get(fqn, fqn) for block in plan.blocks for fqn in _over_vocabulary(block)}
    shared = plan.ties.keys() | plan.used_by_glue
    return _parameters(module, {fqn for fqn in shared if plan.ties.get(fqn, fqn) not in sharded})


def _parameters(module: nn.Module, fqns: Collection[str]) -> list[nn.Parameter]:
    return [tensor for fqn, tensor, _ in named_state(module) if fqn in fqns and isinstance(tensor, nn.Parameter)]


def _kind_of(block: nn.Module, excluded: Collection[nn.Parameter]) -> Hashable:
    """Blocks of one kind get the same plan for the same inputs."""
    shared = {id(parameter) for parameter in excluded}
    parameters = tuple(
        (fqn, tuple(p.shape), p.dtype, p.requires_grad, id(p) in shared) for fqn, p in block.named_parameters()
    )
    return type(block), repr(block), parameters


def _described(inputs: Any) -> str:
    """Equal for calls that planning can't tell apart."""
    return repr(tree_map(lambda leaf: type(leaf) if is_opaque(leaf) else leaf, inputs))


def _examples(inputs: Any) -> Any:
    def example(leaf: Any) -> Any:
        if not isinstance(leaf, TensorMeta):
            return leaf
        return torch.empty(leaf.shape, dtype=leaf.dtype, device="meta", requires_grad=leaf.requires_grad)

    return tree_map(example, inputs)
