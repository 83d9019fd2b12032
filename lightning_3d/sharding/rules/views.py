"""Views of tensors that are sharded on one dim: cut between parts, in another shape, repeated.

A dim in parts comes from a fused projection (parts: query, key, value) and from flattening a sharded dim into one
before it, as in ``[batch, heads, ...] -> [batch * heads, ...]`` (one part per batch element). DTensor has no placement
for unequal parts.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from itertools import accumulate
from types import NoneType
from typing import Any

import torch
from torch import Tensor

from lightning_3d.sharding.axis import Axis
from lightning_3d.sharding.placement import Shard, Sharded, chunked, in_parts, lengths_of, with_length
from lightning_3d.sharding.rules.call import LocalCall, TorchCall
from lightning_3d.sharding.rules.function import Function, tensors_in
from lightning_3d.sharding.sharded_tensor import ShardedTensor, parts_of, placement_of, shard_dim

CUTS = frozenset({"split", "split_with_sizes", "chunk", "tensor_split", "narrow", "__getitem__"})

VIEWS = frozenset({"view", "reshape", "unflatten", "flatten", "unsqueeze", "squeeze", "__getitem__"})

SEPARATE = CUTS | VIEWS
"""Calls that may separate the features of a dim."""

_MAX_VIEWS = 8192
"""Shapes of views that are kept."""


def cut_parts(call: TorchCall, axis: Axis) -> LocalCall | None:
    """A call that cuts its first argument between the parts of its sharded dim."""
    parts = parts_of(call.first)
    if parts is None or (pieces := cut_pieces(call, parts.dim)) is None:
        return None
    edges = [0, *accumulate(parts.sizes)]
    if any(edge not in edges for piece in pieces for edge in piece) or any(start == stop for start, stop in pieces):
        return None
    sizes = [parts.sizes[edges.index(start) : edges.index(stop)] for start, stop in pieces]
    is_single = call.name in ("narrow", "__getitem__")

    def run(local: Tensor) -> Any:
        cut = [local.narrow(parts.dim, start // axis.size, (stop - start) // axis.size) for start, stop in pieces]
        return cut[0] if is_single else tuple(cut)

    return LocalCall(
        tensors=(call.args[0],),
        input_placements=(parts,),
        run=run,
        result=tuple(in_parts(parts.dim, of_piece, axis.size) for of_piece in sizes),
        offsets=tuple(start for start, _ in pieces),
    )


def view_parts(call: TorchCall, axis: Axis) -> LocalCall | None:
    """A view that leaves the dim with the parts, or gives the parts a dim of their own."""
    parts = parts_of(call.first)
    new = None if parts is None else viewed_shape(call)
    if parts is None or new is None:
        return None
    old = tuple(call.args[0].shape)
    before, after = math.prod(old[: parts.dim]), math.prod(old[parts.dim + 1 :])
    if (at := _place(new, before, sum(parts.sizes), after)) is not None:
        return _reshape(call, parts, new, parts.at(at), axis)
    count, length = len(parts.sizes), parts.sizes[0]
    at = _place(new, before, count, length * after)
    if at is None or any(size != length for size in parts.sizes):
        return None
    # What follows the dim of the parts is evenly sharded; viewing that as `new` has it is another call.
    opened = (*new[:at], count, length, *old[parts.dim + 1 :])
    return _reshape(call, parts, opened, Shard(at + 1), axis, epilogue=new)


def view_shards(call: TorchCall, axis: Axis) -> LocalCall | None:
    """A view of shards that flattens their dim into dims before it, or opens it into units, or joins those."""
    at = placement_of(call.first)
    new = viewed_shape(call) if isinstance(at, Shard) else None
    if not isinstance(at, Shard) or new is None:
        return None
    merged = _merge_into_parts(call, at.dim, new, axis) if at.lengths is None else None
    return _view_units(call, at, new, axis) if merged is None else merged


def _merge_into_parts(call: TorchCall, dim: int, new: tuple[int, ...], axis: Axis) -> LocalCall | None:
    old = call.args[0].shape
    for first in range(dim):
        count, length = math.prod(old[first:dim]), old[dim]
        at = _place(new, math.prod(old[:first]), count * length, math.prod(old[dim + 1 :]))
        if at is not None and count > 1:
            return _reshape(call, Shard(dim), new, in_parts(at, (length,) * count, axis.size), axis)
    return None


def _view_units(call: TorchCall, at: Shard, new: tuple[int, ...], axis: Axis) -> LocalCall | None:
    """A view that opens the sharded dim into units such as heads, of which ranks may get unequal numbers, or joins it.

        [batch, tokens, 6 heads * 64]  ->  [batch, tokens, 6 heads, 64]        on 4 ranks 2, 2, 2 and no heads

    What the ranks have of an evenly sharded dim is moved until each has whole units.
    """
    old, dim = tuple(call.args[0].shape), at.dim
    before, length = math.prod(old[:dim]), old[dim]
    for to, count in enumerate(new):
        if math.prod(new[:to]) != before or not count:
            continue
        if count % length == 0 and at.lengths is not None:  # it stays, or what follows it is joined to it
            return _reshape(call, at, new, at.scaled(to, count, length), axis)
        if length % count == 0 and count >= axis.size and (at.lengths is not None or count % axis.size):
            unit = length // count
            is_whole = at.lengths is not None and not any(own % unit for own in at.lengths)
            units = at.scaled(to, 1, unit) if is_whole else chunked(to, count, axis.size)
            return _reshape(call, units.scaled(dim, unit), new, units, axis)
    return None


def repeat_into_parts(call: TorchCall, axis: Axis) -> LocalCall | None:
    """``x.repeat(...)`` of the evenly sharded dim."""
    dim = shard_dim(call.first)
    if dim is None or call.kwargs or not all(type(times) is int for times in call.args[1:]):
        return None
    tensor, times = call.args[0], call.args[1:]
    if call.function is not Tensor.repeat or len(times) != tensor.dim() or times[dim] < 2:
        return None
    result = in_parts(dim, (tensor.shape[dim],) * times[dim], axis.size)
    return LocalCall(tensors=(tensor,), input_placements=(Shard(dim),), run=call.run, result=result)


def take_every_nth(call: TorchCall, axis: Axis) -> LocalCall | None:
    """``x[..., 1::2]`` along the evenly sharded dim, where the step divides what a rank has."""
    dim = shard_dim(call.first)
    if dim is None or call.name != "__getitem__":
        return None
    index = call.args[1] if isinstance(call.args[1], tuple) else (call.args[1],)
    if not all(item is Ellipsis or isinstance(item, slice) for item in index):
        return None
    at = index.index(Ellipsis) if Ellipsis in index else len(index)
    others = [*index[:at], *index[at + 1 :]]
    others[at:at] = [slice(None)] * (call.args[0].dim() - len(others))
    taken = others.pop(dim)
    if taken.stop is not None or any(other != slice(None) for other in others):
        return None
    start, step = taken.start or 0, taken.step or 1
    if not 0 <= start < step or call.args[0].shape[dim] // axis.size % step:
        return None
    return LocalCall(tensors=call.tensors, input_placements=(Shard(dim),), run=call.run, result=Shard(dim))


def take_beside(call: TorchCall, axis: Axis) -> LocalCall | None:
    """``x[..., 0, :3]``: numbers and slices that take all of the sharded dim."""
    at, around = placement_of(call.first), _around(call)
    if at is None or around is None or not call.starts_with_its_tensor:
        return None
    return LocalCall(tensors=call.tensors, input_placements=(at,), run=call.run, result=at.at(around[0]))


def set_beside(call: TorchCall, axis: Axis) -> LocalCall | None:
    """``x[..., 0, :3] = value``: likewise, with a value that lies as ``x`` does."""
    at, around = placement_of(call.first), _around(call)
    if at is None or around is None or not isinstance(value := call.args[2], ShardedTensor):
        return None
    if value.placement != at.at(value.dim() - 1 - around[1]):
        return None
    return LocalCall(tensors=call.tensors, input_placements=(at, value.placement), run=call.run)


def _around(call: TorchCall) -> tuple[int, int] | None:
    """How many dims lie before and after the sharded dim in ``x[index]``; None if that doesn't take all of it."""
    placement, index = placement_of(call.first), call.args[1]
    items = index if isinstance(index, tuple) else (index,)
    ellipses = [i for i, item in enumerate(items) if item is Ellipsis]
    taken = [item for item in items if item is not None and item is not Ellipsis]
    if placement is None or len(ellipses) > 1 or not all(type(item) is int or _is_plain(item) for item in taken):
        return None
    at = ellipses[0] if ellipses else len(items)
    rest = [slice(None)] * (call.first.dim() - len(taken))
    every = [*items[:at], *rest, *items[at + 1 :]]
    sources = [i for i, item in enumerate(every) if item is not None]
    where = sources[placement.dim]
    if every[where] != slice(None):
        return None
    kept = [type(item) is not int for item in every]
    return sum(kept[:where]), sum(kept[where + 1 :])


def _is_plain(item: object) -> bool:
    return isinstance(item, slice) and all(type(end) in (int, NoneType) for end in (item.start, item.stop, item.step))


def make_alike(call: TorchCall, axis: Axis) -> LocalCall | None:
    """A tensor of constants made beside one that is sharded, ``x.new_zeros(...)``, which is sharded alike."""
    at = placement_of(call.first)
    if not isinstance(at, Shard) or len(call.args) < 2 or "size" in call.kwargs:
        return None
    dim = at.dim
    tensor, is_listed = call.args[0], isinstance(call.args[1], list | tuple)
    sizes = [int(size) for size in (call.args[1] if is_listed else call.args[1:])]
    if len(sizes) != tensor.dim() or sizes[dim] != tensor.shape[dim]:
        return None
    values = call.args[2:] if is_listed else ()

    def run(local: Tensor) -> Any:
        return call.function(local, with_length(sizes, dim, local.shape[dim]), *values, **call.kwargs)

    return LocalCall(tensors=(tensor,), input_placements=(at,), run=run, result=at)


def _reshape(
    call: TorchCall,
    at: Sharded,
    shape: tuple[int, ...],
    result: Sharded,
    axis: Axis,
    epilogue: tuple[int, ...] | None = None,
) -> LocalCall:
    """A view of the only tensor; `shape` is the full result's."""
    bounds = Shard(result.dim, lengths_of(result)).bounds(shape[result.dim], axis.size)
    local_shape = with_length(shape, result.dim, bounds[axis.rank + 1] - bounds[axis.rank])
    return LocalCall(
        tensors=(call.args[0],),
        input_placements=(at,),
        run=lambda local: local.reshape(local_shape),
        result=result,
        epilogue=None if epilogue is None else lambda opened: opened.reshape(epilogue),
    )


def cut_pieces(call: TorchCall, dim: int) -> list[tuple[int, int]] | None:
    """The ranges (start, stop) along `dim` that a call cuts its first argument into, or None."""
    is_cut = call.name in CUTS and call.starts_with_its_tensor
    if not is_cut or (call.name == "__getitem__" and not _is_slice(call.args[1])):
        return None
    whole = torch.empty(call.first.shape, device="meta")
    pieces = []
    for piece in tensors_in(call.function(whole, *call.args[1:], **call.kwargs)):
        if piece.stride() != whole.stride() or piece.storage_offset() % whole.stride(dim):
            return None
        if with_length(piece.shape, dim, 0) != with_length(whole.shape, dim, 0):
            return None
        start = piece.storage_offset() // whole.stride(dim)
        pieces.append((start, start + piece.shape[dim]))
    return pieces


def viewed_shape(call: TorchCall) -> tuple[int, ...] | None:
    """The full shape of the result if a call gives its first argument another shape, or None."""
    adds_dims = call.name == "__getitem__" and _adds_dims(call.args[1])
    if (call.name not in VIEWS - {"__getitem__"} and not adds_dims) or not call.starts_with_its_tensor:
        return None
    if adds_dims:
        return tuple(torch.empty(call.first.shape, device="meta")[call.args[1]].shape)
    options = call.args[1:]
    if any(isinstance(item, torch.dtype) for item in options):
        return None  # the same bits as another dtype
    return _shape_of_view(
        call.function, tuple(call.first.shape), _hashable(options), _hashable(tuple(call.kwargs.items()))
    )


@functools.lru_cache(_MAX_VIEWS)
def _shape_of_view(
    function: Function, shape: tuple[int, ...], args: tuple[Any, ...], kwargs: tuple[Any, ...]
) -> tuple[int, ...] | None:
    with torch.inference_mode(False):
        view = function(torch.empty(shape, device="meta"), *args, **dict(kwargs))
    return tuple(view.shape)


def _hashable(value: Any) -> Any:
    return tuple([_hashable(item) for item in value]) if isinstance(value, list | tuple) else value


def num_parts_of(old: Sequence[int], new: Sequence[int], dim: int) -> int:
    """How many parts a view makes of a dim, such as 3 of ``[..., 3 * features] -> [..., 3, features]``."""
    before = math.prod(old[:dim])
    lengths = [size for dim, size in enumerate(new) if math.prod(new[:dim]) == before and size > 1]
    return lengths[0] if lengths and old[dim] % lengths[0] == 0 and lengths[0] < old[dim] else 1


def _place(shape: Sequence[int], before: int, length: int, after: int) -> int | None:
    """The dim of `length` with so many elements before and after it."""
    for dim, size in enumerate(shape):
        if size == length and math.prod(shape[:dim]) == before and math.prod(shape[dim + 1 :]) == after:
            return dim
    return None


def _is_slice(index: object) -> bool:
    items = index if isinstance(index, tuple) else (index,)
    return all(isinstance(item, slice) or item is Ellipsis for item in items)


def _adds_dims(index: object) -> bool:
    """Whether an index, such as ``[:, :, None]``, takes all and gives it dims of length 1."""
    items = index if isinstance(index, tuple) else (index,)
    taken = [item for item in items if item is not None and item is not Ellipsis]
    return any(item is None for item in items) and all(isinstance(i, slice) and i == slice(None) for i in taken)
