"""Calls that only move rows of the sharded dim: shifts, slices, concatenations. The rows that a rank lacks are sent.

What a call does is found by making it with the numbers of rows in place of their values.

    x[:, 1:]  of 8 rows on 2 ranks    rank 0 has 0 1 2 3, wants 1 2 3 4: row 4 comes from rank 1
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeGuard

import torch
from torch import Tensor

from lightning_3d.context.axis import ContextAxis, exchanged_rows
from lightning_3d.sharding.placement import Sharded, chunked
from lightning_3d.sharding.rules.call import TorchCall
from lightning_3d.sharding.rules.function import tensors_in
from lightning_3d.sharding.sharded_tensor import ShardedTensor
from lightning_3d.tensor.vocabulary.lazy_tensor import made

MOVES = frozenset(
    {"__getitem__", "narrow", "roll", "flip", "cat", "concat", "pad", "split", "chunk", "index_select", "tensor_split"}
)
"""Names of calls that may."""

_ZEROS = -1
"""In place of the number of a row: it is new, and all zeros."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Source:
    """An operand of which rows are taken."""

    index: int
    """Among the tensors of the call."""
    first: int
    """The number of its first row among those of all operands."""
    length: int
    at: Sharded | None
    """How it lies; None if every rank has it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Moved:
    """A call that moves rows: which rows it takes of which tensors."""

    dim: int
    sources: tuple[_Source, ...]
    wanted: tuple[Tensor, ...]
    """By result the numbers of its rows."""
    is_single: bool

    def carry_out(self, call: TorchCall, axis: ContextAxis, whole: Any) -> Any:
        """Make the call on slices.

        Args:
            whole: Gives a plain operand as each rank reads other rows of it.
        """
        results = tuple(self._with_rows(rows, call, axis, whole) for rows in self.wanted)
        return results[0] if self.is_single else results

    def _with_rows(self, wanted: Tensor, call: TorchCall, axis: ContextAxis, whole: Any) -> ShardedTensor:
        dim, placement = self.dim, chunked(self.dim, len(wanted), axis.size)
        by_rank = [placement.at(0).own(wanted, axis.size, rank) for rank in range(axis.size)]
        own, count = by_rank[axis.rank], 0
        where, pieces = torch.empty(len(own), dtype=torch.long), list[Tensor]()
        for source in self.sources:
            tensor, start = call.tensors[source.index], source.first
            targets = ((own >= start) & (own < start + source.length)).nonzero()[:, 0]
            if isinstance(tensor, ShardedTensor):
                came, order = _received(tensor, source, by_rank, axis, dim)
                pieces.append(came)
                targets = targets[order]
            else:
                rows = (own[targets] - start).to(tensor.device)
                pieces.append(whole(tensor).index_select(dim, rows))
            where[targets] = count + torch.arange(len(targets))
            count += len(targets)
        if (own == _ZEROS).any():
            where[own == _ZEROS] = count
            shape = [1 if d == dim else length for d, length in enumerate(pieces[0].shape)]
            pieces.append(pieces[0].new_zeros(shape))
        local = torch.cat(pieces, dim).index_select(dim, where.to(pieces[0].device))
        return ShardedTensor(local, axis, placement)


def _received(
    tensor: ShardedTensor, source: _Source, by_rank: Sequence[Tensor], axis: ContextAxis, dim: int
) -> tuple[Tensor, Tensor]:
    """The rows of a sharded tensor that this rank wants, by the rank that had them, and their order among these."""
    start, length, at = source.first, source.length, tensor.placement
    owner, place = torch.empty(length, dtype=torch.long), torch.empty(length, dtype=torch.long)
    for rank in range(axis.size):
        held = at.at(0).own(torch.arange(length), axis.size, rank)
        owner[held], place[held] = rank, torch.arange(len(held))
    asked = [rows[(rows >= start) & (rows < start + length)] - start for rows in by_rank]
    sends = [place[rows[owner[rows] == axis.rank]].to(tensor.device) for rows in asked]
    from_rank = owner[asked[axis.rank]]
    counts = [int((from_rank == rank).sum()) for rank in range(axis.size)]
    return exchanged_rows(made(tensor.own()), axis, dim, sends, counts), from_rank.argsort(stable=True)


def as_move(call: TorchCall) -> Moved | None:
    """Read a call as one that moves rows of the dim on which its tensors are sharded; None if it is none."""
    places = [
        (i, tensor)
        for i, tensor in enumerate(call.tensors)
        if isinstance(tensor, ShardedTensor) or tensor.is_floating_point()
    ]
    dims = {tensor.placement.dim for _, tensor in places if isinstance(tensor, ShardedTensor)}
    if len(dims) != 1 or not _is_along(call, dim := dims.pop(), places[0][1].dim()):
        return None
    if any(tensor.dim() != places[0][1].dim() for _, tensor in places):
        return None
    sources, total = list[_Source](), 0
    for index, tensor in places:
        at = tensor.placement if isinstance(tensor, ShardedTensor) else None
        sources.append(_Source(index=index, first=total, length=tensor.shape[dim], at=at))
        total += tensor.shape[dim]
    inner = [1 if d == dim else min(length, 2) for d, length in enumerate(places[0][1].shape)]
    made = _numbered(call, sources, dim, inner)
    if made is None:
        return None
    results = [made] if isinstance(made, Tensor) else list(made)
    wanted = [_rows_of(result, dim, inner) for result in results]
    if not _all_found(wanted):
        return None
    return Moved(dim=dim, sources=tuple(sources), wanted=tuple(wanted), is_single=isinstance(made, Tensor))


def _all_found(wanted: list[Tensor | None]) -> TypeGuard[list[Tensor]]:
    return all(rows is not None for rows in wanted)


def _is_along(call: TorchCall, dim: int, num_dims: int) -> bool:
    """Whether a call may be read so: padding is by zeros, and what is rolled is this dim."""
    if call.name == "pad":
        return len(call.args) <= 2 and not call.kwargs
    if call.name == "roll":
        rolled = call.kwargs.get("dims", call.args[-1])
        return [d % num_dims for d in ([rolled] if isinstance(rolled, int) else rolled)] == [dim]
    return True


def _numbered(call: TorchCall, sources: Sequence[_Source], dim: int, inner: Sequence[int]) -> Any:
    """The call made with numbers: of each row a few elements, which stand for all of it; None if it can't be."""
    starts = {source.index: source for source in sources}
    others, count = torch.arange(math.prod(inner)).view(*inner), math.prod(inner)
    position = iter(range(len(call.tensors)))

    def numbers(tensor: Tensor) -> Tensor:
        source = starts.get(next(position))
        if source is None:
            return tensor.cpu()
        rows = torch.arange(source.first, source.first + source.length)
        return rows.view([-1 if d == dim else 1 for d in range(tensor.dim())]) * count + others

    kwargs = {"value": _ZEROS} if call.name == "pad" else {}
    try:
        made = call.mapped(numbers)
        result = made.function(*made.args, **made.kwargs, **kwargs)
        position = iter(range(len(call.tensors)))
        meta = call.mapped(
            lambda tensor: torch.empty(tensor.shape, device="meta") if next(position) in starts else tensor
        )
        shapes = [tensor.shape for tensor in tensors_in(meta.function(*meta.args, **meta.kwargs))]
    except Exception:  # code of any function, on other shapes
        return None
    full = call.tensors[sources[0].index].shape
    is_along = all((*shape[:dim], *shape[dim + 1 :]) == (*full[:dim], *full[dim + 1 :]) for shape in shapes)
    return result if is_along else None


def _rows_of(result: Tensor, dim: int, inner: Sequence[int]) -> Tensor | None:
    """The numbers of the rows that a call made with numbers has given; None where it mixed or cut them."""
    if result.dim() != len(inner) or not result.numel():
        return None
    if any(one != other for d, (one, other) in enumerate(zip(result.shape, inner, strict=True)) if d != dim):
        return None
    others, count = torch.arange(math.prod(inner)).view(*inner), math.prod(inner)
    if not ((result == _ZEROS) | (result % count == others)).all():
        return None
    first = result.movedim(dim, 0).reshape(result.shape[dim], -1)[:, 0]
    return torch.where(first < 0, _ZEROS, first // count)
