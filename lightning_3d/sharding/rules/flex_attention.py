"""FlexAttention of this rank's heads, or of its queries; its functions are asked for the true heads and queries."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

from torch import Tensor

from lightning_3d.sharding.axis import Axis
from lightning_3d.sharding.placement import REPLICATE_PARTIAL_GRAD, Shard
from lightning_3d.sharding.rules.attention import Attention, needed_heads
from lightning_3d.sharding.rules.call import LocalCall, TorchCall, on_whole
from lightning_3d.sharding.sharded_tensor import placement_of
from lightning_3d.torch_internals.flex_attention import (
    BlockMask,
    FlexOptions,
    flex_attention,
    with_heads,
    with_mask_mod,
    with_rows,
)

_HEADS, _ROWS = 1, 2
"""Dims of queries ``[batch, heads, queries, head_dim]``."""


def attend_heads(call: TorchCall, axis: Axis) -> LocalCall:
    """Attention of this rank's heads."""
    query, key, value, captured, options = call.args
    shared = Attention(query, key, value).shared()
    if shared is None or shared[0].dim != _HEADS:
        return on_whole(call)
    at, *placements = shared
    bounds = at.bounds(query.shape[_HEADS], axis.size)
    if not _all_have_some(bounds):
        return on_whole(call)
    own = range(bounds[axis.rank], bounds[axis.rank + 1])

    def run(query: Tensor, key: Tensor, value: Tensor, *captured: Tensor) -> Any:
        key, value = (
            needed_heads(tensor, _HEADS, bounds[-1], own) if placement == REPLICATE_PARTIAL_GRAD else tensor
            for tensor, placement in zip((key, value), placements, strict=True)
        )
        mask = options.block_mask
        part = None if mask is None else with_heads(mask, own.start, len(own))
        return flex_attention(query, key, value, captured, _shifted(options, part, first_head=own.start))

    each = (REPLICATE_PARTIAL_GRAD,) * len(captured)
    return LocalCall(
        tensors=(query, key, value, *captured), input_placements=(at, *placements, *each), run=run, result=at
    )


def attend_rows(call: TorchCall, axis: Axis) -> LocalCall | None:
    """Attention of this rank's queries to all keys and values; None where these are no whole blocks of the mask."""
    query, key, value, captured, options = call.args
    at = placement_of(query)
    is_whole = placement_of(key) is None and placement_of(value) is None
    if not isinstance(at, Shard) or at.dim != _ROWS or not is_whole:
        return None
    bounds, mask = at.bounds(query.shape[_ROWS], axis.size), options.block_mask
    if not _all_have_some(bounds) or not _are_blocks(bounds, mask):
        return None
    first, num = bounds[axis.rank], bounds[axis.rank + 1] - bounds[axis.rank]

    def run(query: Tensor, key: Tensor, value: Tensor, *captured: Tensor) -> Any:
        part = None if mask is None else with_rows(mask, first, num)
        return flex_attention(query, key, value, captured, _shifted(options, part, first_row=first))

    each = (REPLICATE_PARTIAL_GRAD,) * (2 + len(captured))
    return LocalCall(tensors=(query, key, value, *captured), input_placements=(at, *each), run=run, result=at)


def _all_have_some(bounds: Sequence[int]) -> bool:
    return all(first < last for first, last in pairwise(bounds))


def _are_blocks(bounds: Sequence[int], mask: BlockMask | None) -> bool:
    """Whether queries between these bounds are whole blocks of a mask."""
    if mask is None:
        return True
    return mask.seq_lengths[0] == bounds[-1] and all(first % mask.BLOCK_SIZE[0] == 0 for first in bounds[:-1])


def _shifted(options: FlexOptions, mask: BlockMask | None, *, first_head: int = 0, first_row: int = 0) -> FlexOptions:
    """The options with a part of the block mask, and functions that get indices among all heads and queries."""
    score_mod = options.score_mod

    def scored(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return score if score_mod is None else score_mod(score, b, h + first_head, q + first_row, k)

    if mask is not None:
        mask_mod = mask.mask_mod

        def masked(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
            return mask_mod(b, h + first_head, q + first_row, k)

        mask = with_mask_mod(mask, masked)
    return replace(options, score_mod=None if score_mod is None else scored, block_mask=mask)
