"""The part of a parameter that this rank's optimizer steps, as a plain tensor that shares the parameter's memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement
from torch.distributed.tensor import Shard as DTensorShard

from lightning_3d.torch_internals.dtensor import StridedShard, part_of, placed
from lightning_3d.torch_internals.tensors import contiguous_stride


def plain(tensor: Tensor) -> Tensor:
    """The tensor that this rank holds: the local one of a DTensor, else the tensor itself."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _is_cut(tensor: Tensor) -> bool:
    return isinstance(tensor, DTensor) and not all(placement.is_replicate() for placement in tensor.placements)


@dataclass(frozen=True, kw_only=True)
class RankShard:
    """This rank's share of what it holds of a parameter: some of its rows along dim 0, or all or nothing.

    Rows are dealt as by ``torch.chunk``, so that the shards of a parameter are the local tensors of a DTensor; or one
    rank, the owner, has all of them.
    """

    parameter: nn.Parameter
    size: int = 1
    """Ranks that share the parameter; 1 where each steps all of it."""
    rank: int = 0
    """Index among them."""
    mesh: DeviceMesh | None = None
    """Their mesh: the dp axis, and the tp axis for a parameter that tensor parallel shards. None if `size` is 1."""
    new_state: Callable[[torch.Size, torch.dtype], Tensor] | None = None
    """Makes the memory of optimizer states where they do not lie with the parameter."""
    owner: int | None = None
    """Index among them of the one that steps all of it; None where its rows are dealt."""

    @cached_property
    def is_sharded(self) -> bool:
        """Whether each rank has some of the rows."""
        return self.size > 1 and self.owner is None

    @property
    def owned_by_other(self) -> bool:
        """Whether another rank steps all of it, so that this one's optimizers do not know it."""
        return self.owner is not None and self.owner != self.rank

    @property
    def steps_part(self) -> bool:
        """Whether optimizers step a part of it, which its states are of, too."""
        return self.owner is None and (self.is_sharded or _is_cut(self.parameter))

    @property
    def stepped_shape(self) -> torch.Size:
        """The shape of what this rank's optimizers step."""
        return self.own(self.parameter).shape

    @cached_property
    def num_rows(self) -> int:
        """Rows that are shared; 1 for a 0-d parameter."""
        held = plain(self.parameter)
        return held.shape[0] if held.dim() else 1

    @cached_property
    def rows_per_rank(self) -> int:
        """Rows of the first ranks, or of the owner; others may have fewer, or none."""
        return -(-self.num_rows // self.size) if self.is_sharded else self.num_rows

    @cached_property
    def elements_per_rank(self) -> int:
        """Elements of these rows."""
        return self.rows_per_rank * (plain(self.parameter).numel() // max(1, self.num_rows))

    def own(self, tensor: Tensor) -> Tensor:
        """This rank's rows of a tensor like the parameter, plain or a DTensor; a view."""
        held = part_of(tensor).detach()
        if not self.is_sharded:
            return held[:0] if self.owned_by_other else held
        return held[self._own_rows]

    @cached_property
    def _own_rows(self) -> slice:
        start = min(self.rank * self.rows_per_rank, self.num_rows)
        return slice(start, min(start + self.rows_per_rank, self.num_rows))

    @property
    def is_all(self) -> bool:
        """Whether optimizers step the parameter itself: all of it is plain and this rank's."""
        return self.size == 1 and not isinstance(self.parameter, DTensor)

    def empty_state(self, dtype: torch.dtype) -> Tensor:
        """Memory for an optimizer state of the shape of what is stepped, where its states lie."""
        own = self.own(self.parameter)
        return torch.empty_like(own, dtype=dtype) if self.new_state is None else self.new_state(own.shape, dtype)

    def like_parameter(self, own: Tensor) -> Tensor:
        """A gradient or a state of what is stepped, placed as a part of the full parameter; others as they are."""
        if self.is_all or self.owner is not None or own.shape != self.stepped_shape or isinstance(own, DTensor):
            return own
        mesh, placements = self._placements()
        shape = self.parameter.shape
        return placed(own, mesh, placements, shape, contiguous_stride(shape))

    def _placements(self) -> tuple[DeviceMesh, list[Placement]]:
        if not isinstance(self.parameter, DTensor):
            assert self.mesh is not None
            return self.mesh, [DTensorShard(0)]
        if self.mesh is None:
            return self.parameter.device_mesh, list(self.parameter.placements)
        (inner,) = self.parameter.placements
        if inner == DTensorShard(0):
            return self.mesh, [StridedShard(0, split_factor=self.parameter.device_mesh.size()), inner]
        return self.mesh, [DTensorShard(0), inner]


Shards = Mapping[nn.Parameter, RankShard]

NO_SHARDS: Shards = MappingProxyType({})


def shard_of(parameter: nn.Parameter, shards: Shards) -> RankShard:
    """Its shard, which is all that this rank holds of it where there is none."""
    return shards.get(parameter) or RankShard(parameter=parameter)
