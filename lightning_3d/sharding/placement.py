"""How a tensor lies over one axis of the mesh: `Replicate`, `Shard`, `InterleavedShard` or `Partial`.

[Note: parts]
The query, key and value features of one fused projection are the parts of one dim, which need not be equal. Every rank
holds its own slice of every part, one after the other. For the parts q and k and 2 ranks:

    original order     q0 q1 q2 q3 | k0 k1 k2 k3
    grouped order      q0 q1 k0 k1 | q2 q3 k2 k3        even shards: rank 0, rank 1

So a parameter in grouped order is an ordinary evenly sharded DTensor, to FSDP2 and to optimizers, too. Files hold the
original order: `InterleavedShard.interleaved` and `deinterleaved` are the two ways between them, and
`interleaved_parameters` says which parameters of a module are in grouped order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import accumulate

import torch
from torch import Tensor, nn

from lightning_3d.zero.attributes import OWN_PREFIX

_MARK = "_grouped_parameters"
"""Attribute of a module: name of a parameter that it owns -> its `InterleavedShard`. It stays when FSDP2 replaces
parameters."""

ORDER = f"{OWN_PREFIX}order"
"""Attribute of a parameter, and of what was computed from it element by element: its `InterleavedShard`, if any."""


@dataclass(frozen=True, slots=True)
class Replicate:
    """Every rank has all of it: a plain tensor."""

    sums_gradients: bool = False
    """Whether the ranks compute different things from it, so that its gradient is the sum of theirs."""


@dataclass(frozen=True, slots=True)
class Partial:
    """A result that is the sum of what the ranks have; it is made at once."""


@dataclass(frozen=True, slots=True)
class Shard:
    """One dim is cut into consecutive shards."""

    dim: int

    lengths: tuple[int, ...] | None = None
    """By rank the length of its shard, 0 among them; None: all are equal."""

    def at(self, dim: int) -> Shard:
        """The same with another dim cut."""
        return Shard(dim, self.lengths)

    def scaled(self, dim: int, factor: int, divisor: int = 1) -> Shard:
        """Shards of a dim with `factor` elements for `divisor` of this one."""
        if self.lengths is None:
            return Shard(dim)
        return Shard(dim, tuple([length * factor // divisor for length in self.lengths]))

    def own(self, full: Tensor, size: int, rank: int) -> Tensor:
        """One rank's part of a full tensor, a view."""
        return full.chunk(size, self.dim)[rank] if self.lengths is None else full.split(self.lengths, self.dim)[rank]

    def sizes(self, full_length: int, size: int) -> tuple[int, ...]:
        """By rank the length of its shard of a dim of this length."""
        return self.lengths or (full_length // size,) * size

    def bounds(self, full_length: int, size: int) -> tuple[int, ...]:
        """Where the shards of a dim of this length begin, and its end."""
        return (0, *accumulate(self.sizes(full_length, size)))


@dataclass(frozen=True, kw_only=True, slots=True)
class InterleavedShard:
    """One dim of a tensor as parts that are each cut evenly over the axis, see [Note: parts]."""

    dim: int

    sizes: tuple[int, ...]
    """Sizes of the parts of the full tensor, in its original order; each a multiple of `num_ranks`."""

    num_ranks: int

    @property
    def local_sizes(self) -> list[int]:
        """Sizes of one rank's slices of each part."""
        return [size // self.num_ranks for size in self.sizes]

    def at(self, dim: int) -> InterleavedShard:
        """The same parts of another dim."""
        return replace(self, dim=dim)

    def own(self, full: Tensor, size: int, rank: int) -> Tensor:
        """One rank's part of a full tensor in its original order."""
        own = [part.chunk(size, self.dim)[rank] for part in full.split(list(self.sizes), self.dim)]
        return torch.cat(own, self.dim)

    def interleaved(self, full: Tensor) -> Tensor:
        """A full tensor from original to grouped order."""
        parts = [part.chunk(self.num_ranks, self.dim) for part in full.split(list(self.sizes), self.dim)]
        return torch.cat([piece for rank in zip(*parts, strict=True) for piece in rank], self.dim)

    def deinterleaved(self, full: Tensor) -> Tensor:
        """A full tensor from grouped to original order."""
        ranks = [shard.split(self.local_sizes, self.dim) for shard in full.chunk(self.num_ranks, self.dim)]
        return torch.cat([piece for part in zip(*ranks, strict=True) for piece in part], self.dim)


def chunked(dim: int, length: int, size: int) -> Shard:
    """A dim of any length as ``torch.chunk`` cuts it: the last ranks' shards may be shorter, or empty."""
    if length % size == 0:
        return Shard(dim)
    longest = -(-length // size)
    return Shard(dim, tuple([min(max(length - rank * longest, 0), longest) for rank in range(size)]))


Sharded = Shard | InterleavedShard
"""Every rank has a part of one dim."""


def full_shape(local: Sequence[int], placement: Sharded, size: int) -> tuple[int, ...]:
    """The shape of the tensor of which a rank has a part of this shape."""
    lengths = lengths_of(placement)
    return with_length(local, placement.dim, local[placement.dim] * size if lengths is None else sum(lengths))


def with_length(shape: Sequence[int], dim: int, length: int) -> tuple[int, ...]:
    """A shape with another length of a dim."""
    return (*shape[:dim], length, *shape[dim + 1 :])


Placement = Replicate | Shard | InterleavedShard | Partial

REPLICATE = Replicate()

REPLICATE_PARTIAL_GRAD = Replicate(sums_gradients=True)
"""A replicated input of computations that differ by rank: its gradient is partial."""


def lengths_of(placement: object) -> tuple[int, ...] | None:
    """The lengths of a tensor's shards; None where they are equal, and for what is not sharded."""
    return placement.lengths if isinstance(placement, Shard) else None


def in_parts(dim: int, sizes: Sequence[int], num_ranks: int) -> Sharded:
    """A dim of several parts, or of one."""
    return InterleavedShard(dim=dim, sizes=tuple(sizes), num_ranks=num_ranks) if len(sizes) > 1 else Shard(dim)


def mark(owner: nn.Module, name: str, parts: InterleavedShard) -> None:
    """Note on a module that a parameter that it owns is in grouped order."""
    vars(owner).setdefault(_MARK, {})[name] = parts


def interleaved_parameters(module: nn.Module) -> dict[str, InterleavedShard]:
    """FQN -> parts, for all parameters of a module in grouped order, ties under every name."""
    found: dict[str, InterleavedShard] = {}
    for prefix, owner in module.named_modules(remove_duplicate=False):
        found.update({f"{prefix}.{name}" if prefix else name: parts for name, parts in marks_of(owner).items()})
    return found


def order_of(tensor: Tensor) -> InterleavedShard | None:
    """The parts of a tensor in grouped order."""
    return vars(tensor).get(ORDER)


def marks_of(owner: nn.Module) -> Mapping[str, InterleavedShard]:
    """Name -> parts, for the parameters in grouped order that a module owns itself."""
    marks: Mapping[str, InterleavedShard] = vars(owner).get(_MARK, {})
    return marks


def marks_hidden(module: nn.Module) -> ExitStack:
    """Let a module whose parameters are whole have none in grouped order, until the end of what this returns."""
    undone = ExitStack()
    for owner in module.modules():
        if _MARK in vars(owner):
            undone.callback(vars(owner).update, {_MARK: vars(owner).pop(_MARK)})
    return undone
