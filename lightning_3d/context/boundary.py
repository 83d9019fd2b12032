"""Slices of sequences between pipeline stages: each rank sends its own to the rank with the same slice.

Both stages know by the trace alone how a tensor crosses, in whatever form the sender has it, so that no message tells.
"""

from __future__ import annotations

from dataclasses import replace

from lightning_3d.context.dims import SequenceDims
from lightning_3d.sharding.placement import Shard, chunked, with_length
from lightning_3d.trace.ghost import TensorMeta
from lightning_3d.trace.trace import Trace


def placement_between_stages(trace: Trace, i: int, dims: SequenceDims, size: int) -> Shard | None:
    """How a tensor with this id in the trace lies over `size` ranks on its way, and its gradient: cut along the
    sequence of the first block that gets it. None: it goes as a whole, as where a rank would have none of it.
    """
    meta = trace.tensors[i]
    dim = dims.of(trace.readers.get(i, ""), len(meta.shape)) if meta.dtype.is_floating_point else None
    if dim is None:
        return None
    at = chunked(dim, meta.shape[dim], size)
    return at if all(at.sizes(meta.shape[dim], size)) else None


def slice_between_stages(trace: Trace, i: int, dims: SequenceDims, size: int, rank: int = 0) -> TensorMeta:
    """The part of such a tensor that a rank sends and receives; the first rank has most."""
    at, meta = placement_between_stages(trace, i, dims, size), trace.tensors[i]
    if at is None:
        return meta
    length = at.sizes(meta.shape[at.dim], size)[rank]
    return replace(meta, shape=with_length(meta.shape, at.dim, length), strides=None)
