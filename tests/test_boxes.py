"""Boxes: what every rank holds of a tensor in any placement, against torch's own and shards that are cut by hand."""

from __future__ import annotations

from itertools import product

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.distributed.tensor import Placement, Replicate, Shard

from lightning_3d.checkpoint.box import Box, boxes
from lightning_3d.sharding.placement import InterleavedShard
from lightning_3d.torch_internals.dtensor import StridedShard

SIZES = st.integers(0, 13)


def _local(full: Tensor, held: list[Box], like: Tensor) -> Tensor:
    """A rank's local tensor, put together of its boxes."""
    local = torch.full_like(like, -1)
    for box in held:
        local[box.local] = full[box.full]
    return local


def _values(*shape: int) -> Tensor:
    return torch.arange(torch.Size(shape).numel()).view(shape)


def _chunk(tensor: Tensor, size: int, dim: int, index: int) -> Tensor:
    """One of as many chunks, which may be empty."""
    found = tensor.chunk(size, dim)
    return found[index] if index < len(found) else tensor.narrow(dim, 0, 0)


@given(st.tuples(SIZES, SIZES), st.lists(st.tuples(st.integers(1, 4), st.sampled_from([0, 1, None])), max_size=3))
def test_axes_shard_one_after_the_other(shape: tuple[int, int], axes: list[tuple[int, int | None]]) -> None:
    full = _values(*shape)
    placements: list[Placement] = [Replicate() if dim is None else Shard(dim) for _, dim in axes]
    sizes = [size for size, _ in axes]
    seen = torch.zeros_like(full)
    for coordinate in product(*map(range, sizes)):
        expected = full
        for (size, dim), index in zip(axes, coordinate, strict=True):
            expected = expected if dim is None else _chunk(expected, size, dim, index)
        held = boxes(shape, sizes, coordinate, placements)
        assert len(held) <= 1 or not full.numel()
        assert torch.equal(_local(full, held, expected), expected)
        for box in held:
            seen[box.full] += 1
    assert torch.equal(seen, torch.full_like(seen, torch.Size([s for s, dim in axes if dim is None]).numel()))


@given(SIZES, st.integers(1, 4), st.integers(1, 4), st.sampled_from([0, 1]), st.lists(st.integers(1, 3), max_size=4))
def test_fully_shard_over_tensor_parallel(rows: int, tp: int, dp: int, dim: int, parts_per_rank: list[int]) -> None:
    """Also over fused weights, in any sizes, along the same dim or the other."""
    sizes = tuple(tp * size for size in parts_per_rank)
    parts = InterleavedShard(dim=0, sizes=sizes, num_ranks=tp) if sizes else None
    full = _values(sum(sizes) if parts else rows, 5)
    is_over = dim == 0 and tp > 1  # as torch names it
    placements = [StridedShard(0, split_factor=tp) if is_over else Shard(dim), Shard(0)]
    seen = torch.zeros_like(full)
    for rank, index in product(range(dp), range(tp)):
        of_tp = _chunk(full, tp, 0, index) if parts is None else parts.own(full, tp, index)
        expected = _chunk(of_tp, dp, dim, rank)
        held = boxes(full.shape, (dp, tp), (rank, index), placements, parts)
        assert torch.equal(_local(full, held, expected), expected)
        for box in held:
            seen[box.full] += 1
            assert box.sizes == full[box.full].shape
    assert torch.equal(seen, torch.ones_like(seen))


def test_a_number_is_held_by_every_rank() -> None:
    assert boxes((), (2, 2), (1, 0), (Replicate(), Replicate())) == [Box(full=(), local=())]
