"""The part of a full tensor that a rank holds, as one box: an offset and a size per dim.

Files hold boxes. FSDP2 over tensor parallel shards a dim twice, the inner axis first, which DTensor writes as
(`_StridedShard(d, split_factor=tp)`, `Shard(d)`); each rank's part of that is still one box. A `_StridedShard` that
counts anything else (the parts of a fused qkv weight) leaves a rank with several pieces, of which
torch.distributed.checkpoint would record the first offset only and write wrong data. Such axes are replicated here
before they meet a file.

    full tensor, 8 rows         tp 0: dp 0 | dp 1    tp 1: dp 0 | dp 1        _StridedShard(0, 2), Shard(0)
                                0  1  |  2  3          4  5  |  6  7
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from lightning_3d.errors import CheckpointError
from lightning_3d.torch_internals.dtensor import StridedShard, local_shape_and_offset, placed
from lightning_3d.zero.shard import RankShard, Shards


@dataclass(frozen=True, kw_only=True)
class TensorInfo:
    """Shape and dtype of a full tensor, to make room for it before it arrives from another rank or a file."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @staticmethod
    def of(value: object) -> TensorInfo | None:
        """The shape and dtype of `value`; None if it is not a tensor."""
        return TensorInfo(shape=tuple(value.shape), dtype=value.dtype) if isinstance(value, Tensor) else None


def is_part(tensor: object) -> bool:
    """Whether a rank has a part of a tensor, or nothing of it."""
    return isinstance(tensor, Tensor) and (isinstance(tensor, DTensor) or tensor.is_meta)


def check_placements(tensors: Mapping[str, object]) -> None:
    """Refuse placements whose full value torch itself does not restore.

    Raises:
        CheckpointError: Names the FQN. It is fully_shard over a dim that tensor parallel sharded in pieces: torch 2.13
            describes the result as (`_StridedShard`, `_StridedShard`), whose `full_tensor()` has the rows in a wrong
            order.

    """
    for fqn, tensor in tensors.items():
        if not isinstance(tensor, DTensor):
            continue
        changed = zip(tensor.placements, _box_placements(tensor), strict=True)
        in_pieces = {was.dim for was, kept in changed if isinstance(was, StridedShard) and was != kept}
        for dim in in_pieces:
            if sum(_shards(placement, dim) for placement in tensor.placements) > 1:
                raise CheckpointError(
                    f"{fqn} has placements {tensor.placements} on mesh {tuple(tensor.device_mesh.shape)}: dim {dim} is "
                    "sharded in pieces and sharded again, which torch does not undo correctly. Shard another dim of it "
                    "(shard_placement_fn of fully_shard), or shard it without pieces"
                )


def as_box(tensor: Tensor) -> Tensor:
    """`tensor` with one box per rank: itself where it is so, else redistributed (a collective on its mesh)."""
    if not isinstance(tensor, DTensor):
        return tensor
    placements = _box_placements(tensor)
    if placements == tensor.placements:
        return tensor
    return _on_device_of_mesh(tensor).redistribute(placements=placements)


@torch.no_grad()
def take_box(target: Tensor, box: Tensor) -> None:
    """Copy `box`, made by `as_box(target)` and filled since, back into `target`; without communication."""
    if box is not target:
        assert isinstance(target, DTensor)
        assert isinstance(box, DTensor)
        target.to_local().copy_(box.redistribute(placements=target.placements).to_local())


@torch.no_grad()
def fill(target: Tensor, full: Tensor) -> None:
    """Copy this rank's part of `full`, a plain tensor on any device, into `target`; converts dtype.

    Only this part of `full` is read, which matters when it lies in a memory-mapped file.
    """
    if not isinstance(target, DTensor):
        target.copy_(full)
        return
    box = as_box(target)
    assert isinstance(box, DTensor)
    sizes, offsets = local_shape_and_offset(box.shape, box.device_mesh, box.placements)
    part = tuple(slice(offset, offset + size) for offset, size in zip(offsets, sizes, strict=True))
    box.to_local().copy_(full[part])
    take_box(target, box)


@torch.no_grad()
def full_value(tensor: Tensor) -> Tensor:
    """The full tensor on every rank of its mesh; a collective there. Plain tensors are full already."""
    if not isinstance(tensor, DTensor):
        return tensor
    tensor = _on_device_of_mesh(tensor)
    # One axis at a time, in the reverse of the order in which they were sharded. `full_tensor()` does the like, but
    # logs a warning that one all-gather can't do it all.
    strided = [axis for axis, placement in enumerate(tensor.placements) if isinstance(placement, StridedShard)]
    others = [axis for axis in range(tensor.device_mesh.ndim) if axis not in strided]
    for axis in [*strided, *reversed(others)]:
        placements = list(tensor.placements)
        placements[axis] = Replicate()
        tensor = tensor.redistribute(placements=placements)
    return tensor.to_local()


def _on_device_of_mesh(tensor: DTensor) -> DTensor:
    """The same, or a copy of what is offloaded, as collectives of the mesh need it."""
    mesh = tensor.device_mesh
    if tensor.device.type == mesh.device_type:
        return tensor
    local = tensor.to_local().to(mesh.device_type)
    return placed(local, mesh, tensor.placements, tensor.shape, tensor.stride())


def empty_state(parameter: nn.Parameter, info: TensorInfo, shards: Shards) -> Tensor:
    """Room for an optimizer state of `parameter`: placed as its shard is if it has its shape, else a plain tensor.

    Raises:
        CheckpointError: The parameter is sharded and the shape of the state is neither its own nor a scalar's.

    """
    shard = shards.get(parameter, RankShard(parameter=parameter))
    if math.prod(info.shape) == 1 and info.shape != tuple(parameter.shape):
        return torch.empty(
            info.shape, dtype=info.dtype
        )  # a step count; torch moves it off the CPU where it has to be elsewhere
    if info.shape == tuple(parameter.shape):
        return shard.like_parameter(shard.empty_state(info.dtype))
    if isinstance(parameter, DTensor) or shard.is_dealt:
        raise CheckpointError(
            f"an optimizer state of shape {info.shape} belongs to a sharded parameter of shape "
            f"{tuple(parameter.shape)}: only states of the parameter's shape and scalars can be sharded"
        )
    return torch.empty(info.shape, dtype=info.dtype, device=parameter.device)


def _box_placements(tensor: DTensor) -> tuple[Placement, ...]:
    kept = list(tensor.placements)
    for axis in reversed(range(len(kept))):
        placement = kept[axis]
        if isinstance(placement, StridedShard):
            inner = range(axis + 1, len(kept))
            shards = math.prod(tensor.device_mesh.size(i) for i in inner if _shards(kept[i], placement.dim))
            if placement.split_factor != shards:
                kept[axis] = Replicate()
    return tuple(kept)


def _shards(placement: Placement, dim: int) -> bool:
    return isinstance(placement, Shard | StridedShard) and placement.dim == dim
