"""The placements of a fake run's tensors, and what changing them communicates."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

from torch import Tensor
from torch.distributed.tensor import Placement, Replicate, Shard

from lightning_3d.tensor.parts import Parts

Kind = Literal["all-reduce", "all-gather", "all-to-all", "reduce-scatter"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Communication:
    """One collective of the forward."""

    kind: Kind

    num_bytes: int
    """Bytes that each rank sends (ring algorithms)."""

    call: str
    """Name of the call that needs it."""

    sources: frozenset[str]
    """FQNs of the column weights that the tensor's sharding comes from."""

    row: str | None = None
    """FQN of the row weight whose output is reduced; None for any other communication."""


@dataclass(frozen=True, slots=True)
class Sharding:
    """The entry of a tensor that is sharded or partially reduced."""

    placement: Placement

    sources: frozenset[str]
    """FQNs of the column weights that it comes from."""

    parts: Parts | None = None
    """What the sharded dim consists of, if it is in grouped order."""

    start: int = 0
    """The output feature of the weight with which the sharded dim begins."""


class Ledger:
    """A table beside the tensors of one fake run; a tensor without an entry is replicated.

    Args:
        size: Length of the tp axis.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.communications: list[Communication] = []
        # Keyed by id: every tensor with an entry is kept alive, so that no id is used twice.
        self._entries: dict[int, Sharding] = {}
        self._kept: list[Tensor] = []
        self._is_closed = False

    @contextmanager
    def closed(self) -> Iterator[None]:
        """Let ops run as if on full tensors: nothing counts as sharded."""
        outer, self._is_closed = self._is_closed, True
        try:
            yield
        finally:
            self._is_closed = outer

    def entry(self, tensor: Tensor) -> Sharding | None:
        """What is known of a sharded tensor; None if it is replicated."""
        return None if self._is_closed else self._entries.get(id(tensor))

    def placement(self, tensor: Tensor) -> Placement:
        """The placement of any tensor."""
        entry = self.entry(tensor)
        return Replicate() if entry is None else entry.placement

    def dim(self, tensor: Tensor) -> int | None:
        """The dim that a tensor is evenly sharded on, in its original order; None for any other placement."""
        placement = self.placement(tensor)
        if not isinstance(placement, Shard) or tensor.shape[placement.dim] % self.size or self.parts(tensor):
            return None
        return placement.dim

    def parts(self, tensor: Tensor) -> Parts | None:
        """The parts of a tensor in grouped order; None for any other."""
        return None if (entry := self.entry(tensor)) is None else entry.parts

    def sources(self, tensors: Sequence[Tensor]) -> frozenset[str]:
        """The column weights that any of the tensors comes from."""
        entries = [self.entry(tensor) for tensor in tensors]
        return frozenset[str]().union(*(entry.sources for entry in entries if entry is not None))

    def put(self, tensor: Tensor, placement: Placement, sources: frozenset[str]) -> None:
        """Enter the placement of a result."""
        self._kept.append(tensor)
        if placement.is_replicate():
            self._entries.pop(id(tensor), None)
        else:
            self._entries[id(tensor)] = Sharding(placement, sources)

    def start(self, tensor: Tensor) -> int:
        """The output feature of its weight with which the sharded dim of a tensor begins."""
        return 0 if (entry := self.entry(tensor)) is None else entry.start

    def put_parts(self, tensor: Tensor, parts: Parts, sources: frozenset[str], start: int = 0) -> None:
        """Enter a result whose sharded dim consists of parts; of a single part it is in its original order."""
        self.put(tensor, Shard(parts.dim), sources)
        kept = parts if len(parts.sizes) > 1 else None
        self._entries[id(tensor)] = Sharding(Shard(parts.dim), sources, kept, start)

    def gather(self, tensor: Tensor, call: str) -> None:
        """Count what makes a tensor whole for a call; its entry stays."""
        if (entry := self.entry(tensor)) is not None:
            self.move(tensor, entry.placement, Replicate(), entry.sources, call)

    def complete(self, tensors: Sequence[Tensor], call: str) -> None:
        """Count what makes replicated tensors whole of which every rank has changed its own part."""
        num_bytes = sum(tensor.numel() * tensor.element_size() for tensor in tensors) * (self.size - 1) // self.size
        if tensors:
            made = Communication(kind="all-gather", num_bytes=num_bytes, call=call, sources=frozenset())
            self.communications.append(made)

    def reduce(self, tensor: Tensor, call: str) -> None:
        """Make a partially reduced result replicated at once; leaves any other as it is."""
        if self.placement(tensor).is_partial():
            self.gather(tensor, call)
            self.put(tensor, Replicate(), frozenset())

    def move(
        self,
        tensor: Tensor,
        source: Placement,
        target: Placement,
        sources: frozenset[str],
        call: str,
        row: str | None = None,
    ) -> None:
        """Count the change of a placement; what needs only local work is free."""
        if source == target or source.is_replicate() or target.is_partial():
            return
        num_bytes, size = tensor.numel() * tensor.element_size(), self.size
        kind: Kind
        if source.is_partial():
            kind = "all-reduce" if target.is_replicate() else "reduce-scatter"
            sent = num_bytes * (size - 1) // size * (2 if target.is_replicate() else 1)
        elif target.is_replicate():
            kind, sent = "all-gather", num_bytes * (size - 1) // size
        else:
            kind, sent = "all-to-all", num_bytes * (size - 1) // size**2
        self.communications.append(Communication(kind=kind, num_bytes=sent, call=call, sources=sources, row=row))
