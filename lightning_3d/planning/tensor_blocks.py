"""Tensor parallel for the blocks of a plan: each block's sharding."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor, nn

from lightning_3d.config.tensor import TensorConfig
from lightning_3d.model.kinds import identity_of
from lightning_3d.model.pytrees import is_opaque
from lightning_3d.planning.plan import BlockPlan, Plan
from lightning_3d.planning.state_places import find_ties, used_by_glue
from lightning_3d.tensor import BlockTensorPlan, check_roles, plan_block, replicated_plan, roles_by_hand
from lightning_3d.tensor.plan.block_plan import Role
from lightning_3d.tensor.vocabulary.weight_roles import VocabularyRoles, WeightRoles, find_vocabulary, with_vocabulary
from lightning_3d.torch_internals.modules import named_state
from lightning_3d.torch_internals.pytree import tree_map, tree_map_only
from lightning_3d.trace.ghost import TensorMeta
from lightning_3d.trace.output_uses import find_sharded_logits, unread_outputs
from lightning_3d.trace.trace import Trace
from lightning_3d.waits import long_wait


def plan_blocks(
    module: nn.Module,
    blocks: Mapping[str, nn.Module],
    trace: Trace,
    config: TensorConfig,
    size: int,
) -> dict[str, BlockTensorPlan]:
    """Give every block its sharding. Blocks that are alike are planned once.

    Args:
        size: Of the tp axis.

    Raises:
        PlanError: a rule of ``config.plan`` names nothing or can't be followed.
    """
    ties, by_glue = find_ties(module), used_by_glue(trace)
    excluded = parameters_of(module, ties.keys() | by_glue)
    by_hand = roles_by_hand(config.plan, module, blocks)
    vocabulary = _find_vocabulary(module, blocks, trace, by_hand, size, ties, parameters_of(module, by_glue))
    unused_outputs = unread_outputs(trace)
    found: dict[Hashable, BlockTensorPlan] = {}
    planned = dict[str, BlockTensorPlan]()
    for number, (fqn, block) in enumerate(blocks.items(), 1):
        use, roles, leaves = vocabulary[fqn], by_hand.get(fqn, {}), unused_outputs.get(fqn, frozenset())
        if fqn not in trace.block_inputs:
            rest = replicated_plan(block, size=size, reason=f"{fqn} was not called in the traced step")
            planned[fqn] = with_vocabulary(rest, use)
            continue
        inputs = trace.block_inputs[fqn]
        kind = _kind_of(fqn, block, excluded)
        key = (kind, tuple(roles.items()), leaves, _described((use, *inputs)))
        if key not in found:
            args, kwargs = example_inputs(inputs)
            find = partial(
                plan_block,
                block,
                args,
                kwargs,
                size=size,
                excluded=[*excluded, *(block.get_parameter(fqn) for fqn in use.fqns)],
                by_hand={fqn: role for fqn, role in roles.items() if role != "vocabulary"},
                unused_outputs=leaves,
            )
            with long_wait(f"Planning {fqn}, block {number} of {len(blocks)}"):
                best = _best(find, sequence_parallel=config.sequence_parallel and not use.fqns)
            found[key] = with_vocabulary(best, use)
        check_roles(found[key], roles, fqn)
        planned[fqn] = found[key]
    return planned


def _best(find: Callable[..., BlockTensorPlan], *, sequence_parallel: bool) -> BlockTensorPlan:
    """A block's sharding, along its sequence too if that can be."""
    best = find(sequence_parallel=sequence_parallel)
    if sequence_parallel and not best.is_sharded:
        whole = find(sequence_parallel=False)
        return replace(whole, not_sequence_parallel=f"{best.reason} ({whole.summary})")
    return best


def _find_vocabulary(
    module: nn.Module,
    blocks: Mapping[str, nn.Module],
    trace: Trace,
    by_hand: Mapping[str, Mapping[str, Role]],
    size: int,
    ties: Mapping[str, str],
    by_glue: Collection[nn.Parameter],
) -> Mapping[str, VocabularyRoles]:
    """Find the weights of each block to shard over the vocabulary; tied ones only if all their blocks can."""
    logits = find_sharded_logits(trace)
    found: dict[str, VocabularyRoles] = {}
    known: dict[Hashable, VocabularyRoles] = {}
    for fqn, inputs in trace.block_inputs.items():
        roles = by_hand.get(fqn, {})
        kind = _kind_of(fqn, blocks[fqn], by_glue)
        key = (kind, tuple(roles.items()), _described(inputs), logits.get(fqn))
        if key not in known:
            known[key] = find_vocabulary(
                blocks[fqn],
                *example_inputs(inputs),
                size=size,
                logits=logits.get(fqn),
                excluded=by_glue,
                by_hand=roles,
            )
        found[fqn] = known[key]
    found.update({fqn: _idle(fqn, blocks[fqn], ties) for fqn in blocks if fqn not in found})
    return _agreed(found, ties, module, blocks, trace)


def _agreed(
    found: Mapping[str, VocabularyRoles],
    ties: Mapping[str, str],
    module: nn.Module,
    blocks: Mapping[str, nn.Module],
    trace: Trace,
) -> Mapping[str, VocabularyRoles]:
    """Without tied weights that a block has found no such use for, or that no called block uses."""
    slots = {_slot(blocks[block], fqn) for block, use in found.items() for fqn in use.fqns}
    called = {ties.get(f"{block}.{fqn}") for block in trace.block_inputs for fqn in found[block].fqns}
    apart = {root for fqn, root in ties.items() if _slot(module, fqn) not in slots or root not in called}
    for block, use in found.items():  # a head's weight goes with its bias
        for bias, weight in use.biases.items():
            if ties.get(f"{block}.{bias}") in apart and f"{block}.{weight}" in ties:
                apart.add(ties[f"{block}.{weight}"])
    return {
        block: use.without({fqn for fqn in use.fqns if ties.get(f"{block}.{fqn}") in apart})
        for block, use in found.items()
    }


def _idle(fqn: str, block: nn.Module, ties: Mapping[str, str]) -> VocabularyRoles:
    """Tied weights of an uncalled block, so that ties can still be sharded."""
    names = [name for name, _ in block.named_parameters(remove_duplicate=False) if f"{fqn}.{name}" in ties]
    return VocabularyRoles(weights=dict.fromkeys(names, WeightRoles()))


def _slot(module: nn.Module, fqn: str) -> tuple[nn.Module, str]:
    """Where a parameter hangs, whatever the names of its module."""
    owner, _, name = fqn.rpartition(".")
    return module.get_submodule(owner), name


def over_vocabulary(block: BlockPlan) -> set[str]:
    """FQNs of what is sharded over the vocabulary."""
    weights = () if block.tensor is None else block.tensor.weights
    return {f"{block.fqn}.{weight.fqn}" for weight in weights if weight.role == "vocabulary"}


def excluded_parameters(plan: Plan, module: nn.Module) -> list[nn.Parameter]:
    """Parameters that code outside their block uses too; they stay plain, but for those sharded over the vocabulary."""
    sharded = {plan.ties.get(fqn, fqn) for block in plan.blocks for fqn in over_vocabulary(block)}
    shared = plan.ties.keys() | plan.used_by_glue
    return parameters_of(module, {fqn for fqn in shared if plan.ties.get(fqn, fqn) not in sharded})


def parameters_of(module: nn.Module, fqns: Collection[str]) -> list[nn.Parameter]:
    """The parameters of these names."""
    return [tensor for fqn, tensor, _ in named_state(module) if fqn in fqns and isinstance(tensor, nn.Parameter)]


def _kind_of(fqn: str, block: nn.Module, excluded: Collection[nn.Parameter]) -> Hashable:
    """Blocks of one kind get the same plan for the same inputs."""
    shared = {id(parameter) for parameter in excluded}
    is_shared = tuple(id(parameter) in shared for parameter in block.parameters())
    return identity_of(fqn, block), is_shared


def _described(inputs: object) -> str:
    """Equal for calls that planning can't tell apart."""
    return repr(
        tree_map(lambda leaf: type(leaf) if is_opaque(leaf) and not isinstance(leaf, TensorMeta) else leaf, inputs)
    )


def example_inputs(inputs: object, form: Callable[[TensorMeta], Tensor] = TensorMeta.on_meta) -> Any:
    """Traced inputs of a block, with meta tensors, or those of another form, in place of ``TensorMeta``."""
    return tree_map_only(TensorMeta, form, inputs)
