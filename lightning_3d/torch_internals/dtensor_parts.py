"""The parts of a DTensor, and which part of the full tensor a rank has."""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter

from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import _StridedShard

__all__ = ["StridedShard", "local_shape_and_offset", "local_tensor", "spec_of"]

StridedShard = _StridedShard
"""A dim that an inner axis of the mesh shards first, or that is sharded piece by piece."""

local_shape_and_offset = compute_local_shape_and_global_offset
"""This rank's box of a full tensor: its sizes and where it begins, per dim."""

local_tensor: Callable[[DTensor], Tensor] = attrgetter("_local_tensor")
"""This rank's part, outside of autograd; ``to_local`` is an autograd function."""

spec_of: Callable[[DTensor], DTensorSpec] = attrgetter("_spec")
"""Mesh, placements, shape and strides, from which ``DTensor(local, spec)`` is made."""
