"""The pieces that ranks send and get in collectives on shards: they follow from placements, and nobody is asked.

Collectives of torch want pieces of one length. Where shards differ in length, shorter ones are padded inside of the
collective, and nowhere else.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from lightning_3d.sharding.placement import Placement, Shard, with_length


def padded(shard: Tensor, at: Shard) -> Tensor:
    """A shard as long as the longest of them; contiguous."""
    if at.lengths is None or shard.shape[at.dim] == max(at.lengths):
        return shard.contiguous()
    missing = max(at.lengths) - shard.shape[at.dim]
    return torch.cat([shard, shard.new_zeros(with_length(shard.shape, at.dim, missing))], at.dim)


def by_rank(full: Tensor, at: Shard, size: int) -> Tensor:
    """The shards of all ranks, padded, one after the other along dim 0; contiguous."""
    if at.lengths is None:
        return full.contiguous() if at.dim == 0 else torch.cat(full.chunk(size, at.dim))
    return torch.cat([padded(shard, at) for shard in full.split(at.lengths, at.dim)])


def in_order(every: Tensor, at: Shard, size: int) -> Tensor:
    """The full tensor, from what `by_rank` gives; contiguous."""
    if at.lengths is None:
        return every if at.dim == 0 else torch.cat(every.chunk(size), at.dim)
    shards = zip(every.chunk(size), at.lengths, strict=True)
    return torch.cat([shard.narrow(at.dim, 0, length) for shard, length in shards], at.dim)


def exchanged(
    shape: Sequence[int], source: Shard, target: Shard, size: int, rank: int
) -> tuple[list[int], list[tuple[int, ...]]]:
    """The pieces of an all-to-all by the other rank: the lengths of those sent along the target's dim, and the shapes
    of those that come.

    Args:
        shape: Of the full tensor.
        source: How it is cut before.
        target: How it is cut afterwards.
        size: The number of ranks.
        rank: The one that sends and gets them.
    """
    before, after = source.bounds(shape[source.dim], size), target.bounds(shape[target.dim], size)
    own, wanted = (before[rank], before[rank + 1]), (after[rank], after[rank + 1])
    if source.dim == target.dim:
        sent = [_overlap(own, other) for other in pairwise(after)]
        return sent, [with_length(shape, source.dim, _overlap(wanted, other)) for other in pairwise(before)]
    got = with_length(shape, target.dim, wanted[1] - wanted[0])
    return [stop - start for start, stop in pairwise(after)], [
        with_length(got, source.dim, stop - start) for start, stop in pairwise(before)
    ]


def num_exchanged(shape: Sequence[int], source: Shard, target: Shard, size: int) -> int:
    """The elements that the rank which sends most sends to others in an all-to-all."""
    got = [exchanged(shape, source, target, size, rank)[1] for rank in range(size)]
    return max(sum(math.prod(got[other][rank]) for other in range(size) if other != rank) for rank in range(size))


def num_padded(shape: Sequence[int], *placements: Placement) -> int:
    """The number of elements of a full tensor whose shards are as long as the longest."""
    for at in placements:
        if isinstance(at, Shard) and at.lengths is not None:
            return math.prod(with_length(shape, at.dim, max(at.lengths) * len(at.lengths)))
    return math.prod(shape)


def _overlap(one: tuple[int, int], other: tuple[int, int]) -> int:
    return max(min(one[1], other[1]) - max(one[0], other[0]), 0)
