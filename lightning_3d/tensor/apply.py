"""Carrying out the tensor-parallel plan of a block: its parameters become DTensors, its forward runs on shards.

Nothing is communicated: every rank of the tp group holds the full, equal values before. Callers of the block see plain,
replicated tensors as before. Afterwards the block can be wrapped by FSDP2 on a mesh that shares the tp axis's root.
"""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from lightning_3d.errors import PlanError
from lightning_3d.model.block_runner import running
from lightning_3d.sharding.axis import MeshAxis
from lightning_3d.sharding.placement import mark
from lightning_3d.tensor.plan.block_plan import BlockTensorPlan, WeightPlan
from lightning_3d.tensor.sharded_forward import ShardedForward, Slot
from lightning_3d.torch_internals.tensors import contiguous_stride


def apply_block(
    block: nn.Module,
    plan: BlockTensorPlan,
    mesh: DeviceMesh,
    *,
    excluded: Collection[nn.Parameter] = frozenset(),
    made: dict[nn.Parameter, nn.Parameter] | None = None,
    axis: MeshAxis | None = None,
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
        axis: Makes its collectives, in place of those of `mesh`.

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
        if weight.parts is not None:
            mark(owner, name, weight.parts)
        if weight.role == "vocabulary":
            vocabulary.append((owner, name))
        else:
            slots[id(owner), name] = (owner, name, weight.sharding)
    running(block).sharded = ShardedForward(block, plan, axis or MeshAxis(mesh), list(slots.values()), vocabulary)


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
        full = local if weight.parts is None else weight.parts.interleaved(local)
        # A copy, so that the storage of the full value is freed.
        chunk = full.chunk(mesh.size(), weight.shard_dim)[mesh.get_local_rank()]
        local = chunk.clone(memory_format=torch.contiguous_format)
    stride = parameter.stride() if weight.shard_dim is None else contiguous_stride(parameter.shape)
    placements, shape = [weight.placement], parameter.shape  # shards need not be equal
    tensor = DTensor.from_local(local, mesh, placements, run_check=False, shape=shape, stride=stride)
    return nn.Parameter(tensor, requires_grad=parameter.requires_grad)
