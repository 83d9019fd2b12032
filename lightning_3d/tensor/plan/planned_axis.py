"""An axis of ranks that exist only on paper: its collectives write down what they would send."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_3d.sharding.axis import Kind
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
        self.forward.append(self.caused("all-reduce", tensor))
        return tensor

    def all_gather(self, local: Tensor, dim: int) -> Tensor:
        every = torch.cat([local.contiguous()] * self.size)
        every = every if dim == 0 else torch.cat(every.chunk(self.size), dim)
        self.forward.append(self.caused("all-gather", every))
        return every

    def reduce_scatter(self, tensor: Tensor, dim: int) -> Tensor:
        self.forward.append(self.caused("reduce-scatter", tensor))
        full = tensor.contiguous() if dim == 0 else torch.cat(tensor.chunk(self.size, dim))
        return full.chunk(self.size)[0].clone()

    def of_first_rank(self, tensor: Tensor) -> Tensor:
        return tensor.clone()

    def expect_backward(self, result: Tensor, kind: Kind, tensor: Tensor) -> None:
        self._expected.append((result.grad_fn, self.caused(kind, tensor, is_backward=True)))

    def backward_of(self, outputs: Iterable[Tensor]) -> list[PlannedCollective]:
        """The collectives of the backward of these outputs."""
        nodes = reachable_nodes(outputs)
        return [caused for node, caused in self._expected if node in nodes]

    def caused(self, kind: Kind, tensor: Tensor, *, is_backward: bool = False) -> PlannedCollective:
        """A collective of a full tensor, with the present cause."""
        call, size = self._cause.call, self.size
        collective = Collective.of_full(kind, tensor.nbytes, call, size=size, is_backward=is_backward)
        return PlannedCollective(collective=collective, cause=self._cause)
