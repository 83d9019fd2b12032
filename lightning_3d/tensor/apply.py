"""Carrying out the tensor-parallel plan of a block: its parameters become DTensors, its forward runs on shards.

Nothing is communicated: every rank of the tp group holds the full, equal values before. Callers of the block see plain,
replicated tensors as before. Afterwards the block can be wrapped by FSDP2 on a mesh that shares the tp axis's root.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.utils._pytree import tree_map

from lightning_3d.errors import PlanError
from lightning_3d.tensor import crossing
from lightning_3d.tensor.plan import BlockTensorPlan
from lightning_3d.tensor.sharded_calls import ShardedCalls

Slot = tuple[nn.Module, str]
"""Where a parameter hangs: the module that owns it, and its name there."""


def apply_block(
    block: nn.Module, plan: BlockTensorPlan, mesh: DeviceMesh, *, excluded: Collection[nn.Parameter] = frozenset()
) -> None:
    """Shard or replicate every parameter of a block as planned and make its forward run on them.

    Names, order, ``requires_grad`` and ties inside the block stay; the Parameter objects are new. Buffers stay plain
    and replicated. Takes each shard from the full value on this rank, without communication.

    Args:
        block: With full parameters, equal on all ranks of `mesh`; they may be on the meta device.
        plan: Made for this block and this mesh's size.
        mesh: The one-dimensional tp axis.
        excluded: Parameters that are left as they are, as others use them, too.

    Raises:
        PlanError: the plan is for another size or another block, or shards an excluded parameter.
    """
    _check(block, plan, mesh, excluded)
    made: dict[int, nn.Parameter] = {}
    replicated: dict[tuple[int, str], Slot] = {}  # a module that hangs in two places has one slot
    for fqn, parameter in list(block.named_parameters(remove_duplicate=False)):
        if any(parameter is other for other in excluded):
            continue
        placement = plan.weight(fqn).placement
        if id(parameter) not in made:
            made[id(parameter)] = _distribute(parameter, placement, mesh)
        owner_name, _, name = fqn.rpartition(".")
        owner = block.get_submodule(owner_name)
        setattr(owner, name, made[id(parameter)])
        if placement.is_replicate():
            replicated[id(owner), name] = (owner, name)
    block.forward = _sharded_forward(block.forward, mesh, list(replicated.values()))


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


def _distribute(parameter: nn.Parameter, placement: Placement, mesh: DeviceMesh) -> nn.Parameter:
    local = parameter.detach()
    if isinstance(placement, Shard):
        # A copy, so that the storage of the full value is freed.
        chunk = local.chunk(mesh.size(), placement.dim)[mesh.get_local_rank()]
        local = chunk.clone(memory_format=torch.contiguous_format)
    tensor = DTensor.from_local(local, mesh, [placement], run_check=False)
    return nn.Parameter(tensor, requires_grad=parameter.requires_grad)


def _sharded_forward(forward: Callable[..., Any], mesh: DeviceMesh, replicated: Sequence[Slot]) -> Callable[..., Any]:
    @functools.wraps(forward)
    def sharded(*args: Any, **kwargs: Any) -> Any:
        with _plain_parameters(replicated), ShardedCalls(mesh):
            output = forward(*args, **kwargs)
        return tree_map(_plain, output)

    return sharded


@contextmanager
def _plain_parameters(slots: Sequence[Slot]) -> Iterator[None]:
    """Let the block's code find replicated parameters as plain tensors, which also suits custom autograd functions."""
    found: list[tuple[dict[str, Any], str, DTensor]] = []
    local: dict[int, Tensor] = {}
    try:
        for owner, name in slots:
            parameters: dict[str, Any] = owner._parameters
            parameter = parameters[name]
            if id(parameter) not in local:
                local[id(parameter)] = parameter.to_local(grad_placements=[Replicate()])
            found.append((parameters, name, parameter))
            parameters[name] = local[id(parameter)]
        yield
    finally:
        for parameters, name, parameter in found:
            parameters[name] = parameter


def _plain(leaf: Any) -> Any:
    return crossing.gather(leaf) if isinstance(leaf, DTensor) else leaf
