"""A rank's share of a tensor, as torch.distributed.checkpoint (DCP) writes and reads it: box by box.

DCP asks any object for its boxes by the protocol that DTensor follows, too; but a DTensor knows of one box only, and
nothing of fused weights in grouped order.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.tensor import DTensor

from lightning_3d.checkpoint.box import Box, boxes_of
from lightning_3d.tensor.placement import Parts
from lightning_3d.torch_internals.dtensor import part_of

TreePath = tuple[str | int, ...]
"""The way through the nested containers of a checkpoint to a value."""


@dataclass(frozen=True, eq=False)
class Share:
    """The part of a tensor that this rank holds."""

    tensor: Tensor
    """Plain, or a DTensor."""
    parts: Parts | None = None
    """Its parts where it is in grouped order; files have the original one."""

    @cached_property
    def boxes(self) -> list[Box]:
        """The places of what it holds."""
        return boxes_of(self.tensor, self.parts)

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


def state_share(value: Tensor, parts: Parts | None) -> Share:
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
