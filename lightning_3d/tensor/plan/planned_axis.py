"""An axis of ranks that exist only on paper: its collectives write down what they would send."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_3d.sharding.axis import Kind, sent_bytes
from lightning_3d.sharding.collectives import bytes_sent, kind_of, placement_of_gradient
from lightning_3d.sharding.pieces import by_rank, exchanged, in_order, num_exchanged, padded
from lightning_3d.sharding.placement import Placement, Shard, Sharded, full_shape
from lightning_3d.tensor.plan.block_plan import Collective
from lightning_3d.torch_internals.autograd import reachable_nodes


class Cause(NamedTuple):
    """Why something is communicated."""

    call: str = ""
    """Name of the call that needs it."""

    sources: frozenset[str] = frozenset()
    """FQNs of the column weights that the tensor's sharding comes from."""

    row: str | None = None
    """FQN of the row weight whose output is reduced; None for any other collective."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedCollective:
    """A collective and its cause."""

    collective: Collective
    cause: Cause


@dataclass(slots=True)
class PlannedAxis:
    """Stands in for an `Axis` in a run on fake tensors, and takes as much memory. Rank 0 stands for all ranks."""

    size: int
    rank: int = 0
    forward: list[PlannedCollective] = field(default_factory=list)
    """In the order of the forward."""

    _cause: Cause = field(default_factory=Cause)
    _expected: list[tuple[object, PlannedCollective]] = field(default_factory=list)

    @contextmanager
    def caused_by(self, **changes: object) -> Iterator[None]:
        """Let what is communicated inside have this cause; what is not given stays as it is outside."""
        outer, self._cause = self._cause, self._cause._replace(**changes)  # type: ignore[arg-type]
        try:
            yield
        finally:
            self._cause = outer

    def all_reduce(self, tensor: Tensor) -> Tensor:
        self.forward.append(self.caused("all-reduce", sent_bytes("all-reduce", tensor.nbytes, self.size)))
        return tensor

    def all_gather(self, local: Tensor, at: Shard) -> Tensor:
        every = torch.cat([padded(local, at)] * self.size)
        self.forward.append(self.caused("all-gather", sent_bytes("all-gather", every.nbytes, self.size)))
        return in_order(every, at, self.size)

    def reduce_scatter(self, tensor: Tensor, at: Shard) -> Tensor:
        every = by_rank(tensor, at, self.size)
        self.forward.append(self.caused("reduce-scatter", sent_bytes("reduce-scatter", every.nbytes, self.size)))
        return every.chunk(self.size)[0].clone()

    def all_to_all(self, local: Tensor, source: Shard, target: Shard) -> Tensor:
        shape = full_shape(local.shape, source, self.size)
        num_bytes = num_exchanged(shape, source, target, self.size) * local.itemsize
        self.forward.append(self.caused("all-to-all", num_bytes))
        pieces = [local.new_empty(shape) for shape in exchanged(shape, source, target, self.size, self.rank)[1]]
        return torch.cat(pieces, source.dim)

    def of_first_rank(self, tensor: Tensor) -> Tensor:
        return tensor.clone()

    def expect_backward(self, result: Tensor, local: Tensor, source: Placement, target: Placement) -> None:
        way = placement_of_gradient(target), placement_of_gradient(source)
        if (kind := kind_of(*way)) is not None:
            shape = full_shape(local.shape, source, self.size) if isinstance(source, Sharded) else local.shape
            num_bytes = bytes_sent(shape, local.itemsize, *way, self.size)
            self._expected.append((result.grad_fn, self.caused(kind, num_bytes, is_backward=True)))

    def backward_of(self, outputs: Iterable[Tensor]) -> list[PlannedCollective]:
        """The collectives of the backward of these outputs."""
        nodes = reachable_nodes(outputs)
        return [caused for node, caused in self._expected if node in nodes]

    def caused(self, kind: Kind, num_bytes: int, *, is_backward: bool = False) -> PlannedCollective:
        """A collective in which a rank sends so many bytes, with the present cause."""
        collective = Collective(kind=kind, num_bytes=num_bytes, call=self._cause.call, is_backward=is_backward)
        return PlannedCollective(collective=collective, cause=self._cause)
