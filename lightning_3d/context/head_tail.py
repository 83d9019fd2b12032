"""Which rows a rank has inside of causal attention: a head and a tail, so that all have as many keys to attend to.

Every slice is cut in two. Of the pieces of c ranks, rank r gets the piece r, its head, and 2c - 1 - r, its tail:

    piece               0  1  2  3  4  5  6  7
    rank, in order      0  0  1  1  2  2  3  3
    rank, head-tail     0  1  2  3  3  2  1  0

Outside of the ring slices lie in order. One all-to-all brings queries, keys and values into the other order, and one
brings the output back; so do two in the backward, with gradients.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from lightning_3d.activations.collective_mode import collective
from lightning_3d.config.context import RowOrder
from lightning_3d.context.axis import ContextAxis
from lightning_3d.torch_internals.dispatch import no_dispatch_modes

_PRODUCTS_PER_NUMBER = 1024
"""Multiplications that a device makes in the time in which it sends one number."""


@dataclass(frozen=True, kw_only=True, slots=True)
class HeadTail:
    """The pieces of one sequence."""

    slices: tuple[int, ...]
    """By rank the rows that it has in order."""

    @property
    def size(self) -> int:
        """The number of ranks."""
        return len(self.slices)

    def owners(self, *, is_in_order: bool) -> list[int]:
        """By piece the rank that has it."""
        pieces = range(2 * self.size)
        return [piece // 2 if is_in_order else min(piece, 2 * self.size - 1 - piece) for piece in pieces]

    def length(self, piece: int) -> int:
        """The rows of a piece; the first of an odd slice has one more."""
        return (self.slices[piece // 2] + 1 - piece % 2) // 2

    @property
    def heads(self) -> tuple[int, ...]:
        """By rank the rows of its head."""
        return tuple([self.length(rank) for rank in range(self.size)])

    @property
    def held(self) -> tuple[int, ...]:
        """By rank the rows of its head and its tail."""
        return tuple([self.length(rank) + self.length(2 * self.size - 1 - rank) for rank in range(self.size)])

    def bytes_sent(self, query: Tensor, key: Tensor) -> int:
        """Bytes that a rank sends in the forward, the one that sends most."""
        before, after = self.owners(is_in_order=True), self.owners(is_in_order=False)
        there, back = [0] * self.size, [0] * self.size
        for piece, (first, second) in enumerate(zip(before, after, strict=True)):
            if first != second:
                there[first] += self.length(piece)
                back[second] += self.length(piece)
        of_query, of_key = (tensor.numel() // max(tensor.shape[-2], 1) for tensor in (query, key))
        numbers = [(of_query + 2 * of_key) * rows + of_query * others for rows, others in zip(there, back, strict=True)]
        return max(numbers) * query.element_size()


def idle_bytes(query: Tensor, size: int) -> int:
    """Bytes that might be sent while the last rank of causal attention in order computes longer than the mean.

    With n rows on each of c ranks a query of the last attends to n (c - 1/2) keys on average, and a query of any to
    n c / 2. A key costs two multiplications for each number of the query.
    """
    rows = -(-query.shape[-2] // size)
    return rows * (size - 1) * (query.numel() // size) // _PRODUCTS_PER_NUMBER * query.element_size()


def head_tail(order: RowOrder, query: Tensor, key: Tensor, slices: tuple[int, ...]) -> HeadTail | None:
    """The pieces, where causal attention in a ring takes them; None where slices stay in order."""
    pieces = HeadTail(slices=slices)
    is_taken = order == "head_tail" or (
        order == "auto" and pieces.bytes_sent(query, key) <= idle_bytes(query, pieces.size)
    )
    return pieces if is_taken else None


def exchanged(tensors: Iterable[Tensor], axis: ContextAxis, pieces: HeadTail, *, is_back: bool) -> tuple[Tensor, ...]:
    """Tensors ``[batch, heads, rows, head_dim]`` with this rank's rows of the other order; one all-to-all.

    Args:
        is_back: Whether those that come are slices in order.
    """
    by_row = [tensor.transpose(1, 2) for tensor in tensors]
    came: tuple[Tensor, ...] = _Exchanged.apply(axis, pieces, is_back, *by_row)  # type: ignore[no-untyped-call]
    return tuple([tensor.transpose(1, 2) for tensor in came])


class _Exchanged(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, axis: ContextAxis, pieces: HeadTail, is_back: bool, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.axis, ctx.pieces, ctx.is_back = axis, pieces, is_back
        return collective(partial(_exchanged, tensors, axis, pieces, is_back=is_back))

    @staticmethod
    @once_differentiable  # as the ring is
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, None, *_exchanged(gradients, ctx.axis, ctx.pieces, is_back=not ctx.is_back)


def _exchanged(tensors: Sequence[Tensor], axis: ContextAxis, pieces: HeadTail, *, is_back: bool) -> tuple[Tensor, ...]:
    """The same of ``[batch, rows, heads, head_dim]``."""
    source, target = pieces.owners(is_in_order=not is_back), pieces.owners(is_in_order=is_back)
    own, coming = ([piece for piece in range(len(source)) if at[piece] == axis.rank] for at in (source, target))
    leaving, arriving = sorted(own, key=target.__getitem__), sorted(coming, key=source.__getitem__)
    shapes = [(tensor.shape[0], -1, *tensor.shape[2:]) for tensor in tensors]
    widths = [-math.prod(shape) for shape in shapes]

    def counts(moved: Iterable[int], peers: Sequence[int]) -> list[int]:
        rows = [0] * axis.size
        for piece in moved:
            rows[peers[piece]] += pieces.length(piece)
        return [sum(widths) * number for number in rows]

    with no_dispatch_modes():  # a recomputation gets what one collective gave
        cut = [dict(zip(own, tensor.split([*map(pieces.length, own)], 1), strict=True)) for tensor in tensors]
        sent = torch.cat([rows[piece].reshape(-1) for piece in leaving for rows in cut])
        got = axis.exchange(sent, counts(own, target), counts(coming, source))
        parts = iter(got.split([width * pieces.length(piece) for piece in arriving for width in widths]))
        came = {piece: [next(parts).view(shape) for shape in shapes] for piece in arriving}
        return tuple([torch.cat(rows, 1) for rows in zip(*(came[piece] for piece in coming), strict=True)])
