"""The memory of the ranks, for people."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

from rich.table import Table

GIB = 2**30


@dataclass(frozen=True, kw_only=True)
class StaticMemory:
    """Bytes that a rank holds whatever it computes."""

    weights: int
    """Parameters and buffers."""
    gradients: int
    """When the step has ended."""
    optimizer_states: int
    batch: int = 0
    communication: int = 0
    """Buffers of collectives over the replicas."""
    workspaces: int = 0
    """Memory of the device's library for products of matrices."""
    step: int = 0
    """Above all of these, in the optimizer's step."""

    @classmethod
    def most(cls, ranks: Sequence[StaticMemory]) -> StaticMemory:
        """The most of each kind that any of these ranks holds."""
        return cls(**{kind.name: max(getattr(rank, kind.name) for rank in ranks) for kind in fields(cls)})

    @property
    def always(self) -> int:
        """In every moment of a step."""
        return self.weights + self.optimizer_states + self.batch + self.communication + self.workspaces


@dataclass(frozen=True, kw_only=True)
class RankMemory:
    """The memory of the ranks at one place of the pp axis, in bytes."""

    held: StaticMemory
    peak: int
    """Predicted, in a training step."""
    budget: int | None
    """None if it is not limited."""

    @property
    def activations(self) -> int:
        """The peak less weights, gradients and optimizer states."""
        return max(self.peak - self.held.weights - self.held.gradients - self.held.optimizer_states, 0)


def size_text(num_bytes: int) -> str:
    """In GiB, or in MiB below one, or in KiB below a tenth of that."""
    if num_bytes >= GIB:
        return f"{num_bytes / GIB:,.2f} GiB"
    return f"{num_bytes / 2**20:,.1f} MiB" if num_bytes >= 2**20 / 10 else f"{num_bytes / 2**10:,.1f} KiB"


def memory_table(ranks: Sequence[RankMemory]) -> Table:
    """A row for each place on the pp axis."""
    table = Table(title="memory of a training step")
    for column in ("pipeline rank", "weights", "gradients", "optimizer", "activations", "peak", "budget"):
        table.add_column(column, justify="right")
    for index, rank in enumerate(ranks):
        held = rank.held
        sizes = [held.weights, held.gradients, held.optimizer_states, rank.activations, rank.peak]
        table.add_row(str(index), *map(size_text, sizes), "none" if rank.budget is None else size_text(rank.budget))
    return table
