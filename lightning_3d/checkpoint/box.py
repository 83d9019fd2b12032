"""Boxes: the places in a full tensor, in its original order, of what one rank holds of it.

Whatever shards a tensor (FSDP, tensor parallel, both, in even or uneven sizes, fused weights in parts, see
[Note: parts]), a rank holds some ranges along each dim, and so some boxes. `boxes` is the one place that says which;
files hold boxes, and reading, writing and gathering go by them.

    8 rows, tp 2, then dp 2 (fully_shard over tensor parallel)
    _StridedShard(0, split_factor=2), Shard(0)      tp 0: dp 0 | dp 1    tp 1: dp 0 | dp 1
                                                    0  1  |  2  3        4  5  |  6  7

    6 rows as the parts q and k of 4 and 2, tp 2
    Shard(0)                                        tp 0: q0 q1 k0       tp 1: q2 q3 k1
                                                    0  1   4             2  3   5         two boxes each
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, product

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from lightning_3d.sharding.placement import InterleavedShard
from lightning_3d.torch_internals.dtensor import StridedShard, part_of, placed


@dataclass(frozen=True, kw_only=True)
class TensorInfo:
    """Shape and dtype of a full tensor, to make room for it before it arrives from another rank or a file."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @staticmethod
    def of(value: object) -> TensorInfo | None:
        """The shape and dtype of `value`; None if it is not a tensor."""
        return TensorInfo(shape=tuple(value.shape), dtype=value.dtype) if isinstance(value, Tensor) else None


@dataclass(frozen=True, kw_only=True)
class Box:
    """A piece of a rank's local tensor."""

    full: tuple[slice, ...]
    """Its place in the full tensor, by dim."""

    local: tuple[slice, ...]
    """Its place in the local tensor."""

    @property
    def offsets(self) -> torch.Size:
        """Where it begins in the full tensor."""
        return torch.Size([along.start for along in self.full])

    @property
    def sizes(self) -> torch.Size:
        """Its shape."""
        return torch.Size([along.stop - along.start for along in self.full])


def boxes(
    shape: Sequence[int],
    mesh_shape: Sequence[int],
    coordinate: Sequence[int],
    placements: Sequence[Placement],
    parts: InterleavedShard | None = None,
) -> list[Box]:
    """The boxes that a rank holds of a tensor, in the order of its local tensor; none where others hold all of it.

    Args:
        shape: The shape of the full tensor.
        mesh_shape: Sizes of the axes of its mesh.
        coordinate: Index of the rank on each axis.
        placements: How each axis shards it.
        parts: The parts of a tensor in grouped order; boxes are of its original one.
    """
    by_dim: list[list[tuple[slice, slice]]] = []
    for dim, size in enumerate(shape):
        runs = [range(size)] if parts is None or parts.dim != dim else _grouped(parts)
        for axis, num_pieces in _axes_of(dim, mesh_shape, placements) if size else ():
            pieces = [_chunk(runs, num_pieces, number) for number in range(num_pieces)]
            runs = [run for piece in pieces for run in _chunk(piece, mesh_shape[axis], coordinate[axis])]
        by_dim.append(_placed_in_a_row(_merged(runs)))
    return [
        Box(full=tuple(full for full, _ in box), local=tuple(local for _, local in box)) for box in product(*by_dim)
    ]


@dataclass(frozen=True, eq=False)
class Share:
    """The part of a tensor that a rank holds, as torch.distributed.checkpoint (DCP) writes and reads it: box by box.

    DCP asks any object for its boxes by the protocol that DTensor follows, too; but a DTensor knows of one box only,
    and nothing of fused weights in grouped order.
    """

    tensor: Tensor
    """Plain, or a DTensor."""
    parts: InterleavedShard | None = None
    """Its parts where it is in grouped order; files have the original one."""

    @cached_property
    def boxes(self) -> list[Box]:
        """The places of what it holds; all of a tensor that is no DTensor."""
        if not isinstance(self.tensor, DTensor):
            return boxes(self.tensor.shape, (), (), (), self.parts)
        mesh, placements = self.tensor.device_mesh, self.tensor.placements
        coordinate = mesh.get_coordinate()
        if coordinate is None:  # the mesh is of other ranks
            return []
        return boxes(self.tensor.shape, mesh.shape, coordinate, placements, self.parts)

    def at(self, box: Box) -> Tensor:
        """The values there; a view."""
        return part_of(self.tensor.detach())[box.local]

    def size(self) -> torch.Size:
        """The shape of the full tensor."""
        return self.tensor.shape

    def __create_write_items__(self, fqn: str, _: object) -> list[WriteItem]:
        properties = TensorProperties.create_from_tensor(part_of(self.tensor.detach()))
        return [
            WriteItem(
                index=MetadataIndex(fqn, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk=chunk, properties=properties, size=self.size()),
            )
            for chunk in self.__create_chunk_list__()
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [ChunkStorageMetadata(offsets=box.offsets, sizes=box.sizes) for box in self.boxes]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        return next(self.at(box) for box in self.boxes if box.offsets == index.offset)


def is_part(tensor: object) -> bool:
    """Whether a rank has a part of a tensor, or nothing of it."""
    return isinstance(tensor, Tensor) and (isinstance(tensor, DTensor) or tensor.is_meta)


@torch.no_grad()
def fill(target: Tensor, full: Tensor, parts: InterleavedShard | None = None) -> None:
    """Copy this rank's part of `full`, a plain tensor on any device, into `target`; converts dtype.

    Only this part of `full` is read, which matters when it lies in a memory-mapped file.

    Args:
        parts: The parts of a target in grouped order, where `full` is in its original one.
    """
    share = Share(target, parts)
    for box in share.boxes:
        share.at(box).copy_(full[box.full])


def state_share(value: Tensor, parts: InterleavedShard | None) -> Share:
    """The share of a state of an optimizer.

    Args:
        parts: The parts of its parameter, which the state has, too, if it is sharded and of the parameter's shape.
    """
    is_along = (
        parts is not None
        and isinstance(value, DTensor)
        and value.dim() > parts.dim
        and value.shape[parts.dim] == sum(parts.sizes)
    )
    return Share(value, parts if is_along else None)


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


def _grouped(parts: InterleavedShard) -> list[range]:
    """Indices of the original order along a dim, in the grouped one."""
    ends = accumulate(parts.sizes)
    of_parts = [range(end - size, end) for end, size in zip(ends, parts.sizes, strict=True)]
    return [
        run for rank in range(parts.num_ranks) for part in of_parts for run in _chunk([part], parts.num_ranks, rank)
    ]


def _axes_of(dim: int, mesh_shape: Sequence[int], placements: Sequence[Placement]) -> list[tuple[int, int]]:
    """The axes that shard a dim, in the order in which they did, each with the number of pieces that it sharded."""
    axes: list[tuple[int, int]] = []
    for axis, placement in reversed(list(enumerate(placements))):
        if isinstance(placement, StridedShard) and placement.dim == dim:
            if placement.split_factor == math.prod(mesh_shape[inner] for inner, _ in axes):
                axes.append((axis, 1))  # what the inner axes had left, as fully_shard does
            else:
                axes.insert(0, (axis, int(placement.split_factor)))  # a fused weight
        elif isinstance(placement, Shard) and placement.dim == dim:
            axes.insert(0, (axis, 1))
    return axes


def _chunk(runs: Sequence[range], num_chunks: int, index: int) -> list[range]:
    """A part of the indices, as ``torch.chunk`` deals them."""
    size = -(-sum(map(len, runs)) // num_chunks)
    found = []
    begin = 0
    for run in runs:
        found.append(run[max(0, index * size - begin) : max(0, (index + 1) * size - begin)])
        begin += len(run)
    return [run for run in found if run]


def _merged(runs: Sequence[range]) -> list[range]:
    merged: list[range] = []
    for run in runs:
        if merged and merged[-1].stop == run.start:
            run = range(merged.pop().start, run.stop)
        merged.append(run)
    return merged


def _placed_in_a_row(runs: Sequence[range]) -> list[tuple[slice, slice]]:
    """Places in the full and in the local tensor."""
    ends = accumulate(map(len, runs))
    return [(slice(run.start, run.stop), slice(end - len(run), end)) for run, end in zip(runs, ends, strict=True)]
