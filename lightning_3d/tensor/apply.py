"""Carrying out the tensor-parallel plan of a block: its parameters become DTensors, its forward runs on shards.

Nothing is communicated: every rank of the tp group holds the full, equal values before. Callers of the block see plain,
replicated tensors as before. Afterwards the block can be wrapped by FSDP2 on a mesh that shares the tp axis's root.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from lightning_3d.custom_functions import custom_functions_seen
from lightning_3d.errors import PlanError
from lightning_3d.tensor import crossing
from lightning_3d.tensor.compiled import BlockCompiler
from lightning_3d.tensor.grouped import GroupedTensor
from lightning_3d.tensor.grouped_calls import whole
from lightning_3d.tensor.kept import KeptActivations
from lightning_3d.tensor.parts import Parts, mark
from lightning_3d.tensor.plan import BlockTensorPlan, WeightPlan
from lightning_3d.tensor.recomputation import is_reentrant, recomputed_by
from lightning_3d.tensor.sequence import SEQUENCE_DIM, sequence_input
from lightning_3d.tensor.sharded_activation import ShardedActivation
from lightning_3d.tensor.sharded_calls import ShardedCalls
from lightning_3d.tensor.sharded_output import as_unread
from lightning_3d.tensor.vocabulary import VocabularyCalls

Slot = tuple[nn.Module, str, Parts | None]
"""Where a parameter hangs: the module that owns it, its name there, and its parts if it is sharded part by part."""


def apply_block(
    block: nn.Module,
    plan: BlockTensorPlan,
    mesh: DeviceMesh,
    *,
    excluded: Collection[nn.Parameter] = frozenset(),
    made: dict[nn.Parameter, nn.Parameter] | None = None,
    compiler: BlockCompiler | None = None,
) -> None:
    """Shard or replicate every parameter of a block as planned and make its forward run on them.

    Names, order, ``requires_grad`` and ties inside the block stay; the Parameter objects are new. Buffers stay plain
    and replicated. Takes each shard from the full value on this rank, without communication.

    Args:
        block: With full parameters, equal on all ranks of `mesh`; they may be on the meta device.
        plan: Made for this block and this mesh's size.
        mesh: The one-dimensional tp axis.
        excluded: Parameters that are left as they are, as others use them, too.
        made: Parameter -> the new one in its place; this block takes what is there and adds its own.
        compiler: Compiles the forward, unless weights are sharded over the vocabulary; None runs it eagerly.

    Raises:
        PlanError: the plan is for another size or another block, or shards an excluded parameter.
    """
    _check(block, plan, mesh, excluded)
    made = {} if made is None else made
    vocabulary: list[tuple[nn.Module, str]] = []
    slots: dict[tuple[int, str], Slot] = {}  # a module that hangs in two places has one slot
    for fqn, parameter in list(block.named_parameters(remove_duplicate=False)):
        if any(parameter is other for other in excluded):
            continue
        weight = plan.weight(fqn)
        if parameter not in made:
            made[parameter] = _distribute(parameter, weight, mesh)
        owner_name, _, name = fqn.rpartition(".")
        owner = block.get_submodule(owner_name)
        setattr(owner, name, made[parameter])
        if weight.role == "vocabulary":
            vocabulary.append((owner, name))
        if weight.parts is not None:
            mark(owner, name, weight.parts)
        if weight.shard_dim is None or weight.parts is not None:
            slots[id(owner), name] = (owner, name, weight.parts)
    run = _run_on_shards(block, plan, mesh, list(slots.values()), vocabulary)
    if compiler is not None and not vocabulary:
        run = compiler.compiled(block, plan, run)
    block.forward = _returned(run) if plan.unread else run


def _check(block: nn.Module, plan: BlockTensorPlan, mesh: DeviceMesh, excluded: Collection[nn.Parameter]) -> None:
    if plan.size != mesh.size():
        raise PlanError(f"a tensor-parallel plan for {plan.size} ranks can't be applied to a tp axis of {mesh.size()}")
    parameters = dict(block.named_parameters(remove_duplicate=False))
    planned = {weight.fqn: weight.shape for weight in plan.weights}
    if planned != {fqn: tuple(parameter.shape) for fqn, parameter in parameters.items()}:
        different = sorted(planned.keys() ^ parameters.keys()) or sorted(
            fqn for fqn, shape in planned.items() if shape != tuple(parameters[fqn].shape)
        )
        raise PlanError(f"{type(block).__name__} is not the block of this tensor-parallel plan: {different} differ")
    for weight in plan.weights:
        if weight.shard_dim is not None and any(parameters[weight.fqn] is other for other in excluded):
            raise PlanError(f"{weight.fqn} is excluded from tensor parallel, but the plan shards it: plan without it")


def _distribute(parameter: nn.Parameter, weight: WeightPlan, mesh: DeviceMesh) -> nn.Parameter:
    local = parameter.detach()
    if weight.shard_dim is not None:
        full = local if weight.parts is None else weight.parts.grouped(local)
        # A copy, so that the storage of the full value is freed.
        chunk = full.chunk(mesh.size(), weight.shard_dim)[mesh.get_local_rank()]
        local = chunk.clone(memory_format=torch.contiguous_format)
    stride = parameter.stride() if weight.shard_dim is None else torch.empty(parameter.shape, device="meta").stride()
    placements, shape = [weight.placement], parameter.shape  # shards need not be equal
    tensor = DTensor.from_local(local, mesh, placements, run_check=False, shape=shape, stride=stride)
    return nn.Parameter(tensor, requires_grad=parameter.requires_grad)


def _run_on_shards(
    block: nn.Module,
    plan: BlockTensorPlan,
    mesh: DeviceMesh,
    slots: Sequence[Slot],
    vocabulary: Sequence[tuple[nn.Module, str]],
) -> Callable[..., Any]:
    forward, kept = block.forward, KeptActivations(block)

    @functools.wraps(forward)
    def on_shards(*args: Any, **kwargs: Any) -> Any:
        sequence = sequence_input(args, mesh.size()) if plan.is_sequence_parallel else None
        if sequence is not None:
            args = (crossing.slice_sequence(sequence, mesh, SEQUENCE_DIM), *args[1:])
        with modes(None if sequence is None else sequence.shape):
            output = forward(*args, **kwargs)
        kept.show()
        return _gathered(output, plan.unread)

    @contextmanager
    def modes(sequence: torch.Size | None) -> Iterator[None]:
        calls = ShardedCalls(mesh, sequence, defers_sums=plan.defers_sums)
        vocabulary_calls = (
            VocabularyCalls(mesh, vocabulary, gathers_logits=plan.gathers_logits) if vocabulary else nullcontext()
        )

        def again(function: Callable[..., Any]) -> Callable[..., Any]:
            def on_shards_again(*args: Any, **kwargs: Any) -> Any:
                with modes(sequence):
                    return function(*args, **kwargs)

            return on_shards_again

        def on_custom_function(cls: Any, function: Callable[..., Any], args: tuple[Any, ...], kwargs: Any) -> Any:
            if is_reentrant(cls):
                args = (again(args[0]), *args[1:])
            return calls.on_custom_function(cls, function, args, kwargs)

        with (
            calls.statistics,
            _local_parameters(slots),
            calls,
            vocabulary_calls,
            custom_functions_seen(on_custom_function),
            recomputed_by(again),
        ):
            yield

    return on_shards


@contextmanager
def _local_parameters(slots: Sequence[Slot]) -> Iterator[None]:
    """Let the block's code find replicated parameters as plain tensors, which also suits custom autograd functions.

    Those that are sharded part by part it finds as what they are.
    """
    found: list[tuple[dict[str, Any], str, DTensor]] = []
    local: dict[int, Tensor] = {}
    try:
        for owner, name, parts in slots:
            parameters: dict[str, Any] = owner._parameters
            parameter = parameters[name]
            if id(parameter) not in local:
                own = crossing.local_shard(parameter)
                local[id(parameter)] = own if parts is None else _in_parts(own, parameter, parts)
            found.append((parameters, name, parameter))
            parameters[name] = local[id(parameter)]
        yield
    finally:
        for parameters, name, parameter in found:
            parameters[name] = parameter


def _in_parts(own: Tensor, parameter: DTensor, parts: Parts) -> GroupedTensor:
    weight = GroupedTensor(own, parameter.device_mesh, parts)
    weight.is_weight = True
    return weight


def _gathered(output: Any, unread: frozenset[int]) -> Any:
    """Plain tensors, but for what nothing reads."""
    if not unread:
        return tree_map(_plain, output)
    leaves, spec = tree_flatten(output)
    gathered = [
        leaf if i in unread and isinstance(leaf, ShardedActivation) else _plain(leaf) for i, leaf in enumerate(leaves)
    ]
    return tree_unflatten(gathered, spec)


def _returned(run: Callable[..., Any]) -> Callable[..., Any]:
    """What callers get of what nothing reads: it is gathered only if something does after all."""

    @functools.wraps(run)
    def returned(*args: Any, **kwargs: Any) -> Any:
        return tree_map(
            lambda leaf: as_unread(leaf) if isinstance(leaf, ShardedActivation) else leaf, run(*args, **kwargs)
        )

    return returned


def _plain(leaf: Any) -> Any:
    return whole(leaf) if isinstance(leaf, Tensor) else leaf
