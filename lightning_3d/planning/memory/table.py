"""The memory of the ranks, for people."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.table import Table

from lightning_3d.planning.memory.timeline import HeldMemory

GIB = 2**30


@dataclass(frozen=True, kw_only=True)
class RankMemory:
    """The memory of the ranks at one place of the pp axis, in bytes."""

    held: HeldMemory
    peak: int
    """Predicted, in a training step."""
    budget: int
    measured: int | None = None
    """In the second training step; None before it, or where it can't be measured."""

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
    columns = ["pipeline rank", "weights", "gradients", "optimizer", "activations", "peak", "budget", "measured"]
    for column in columns:
        table.add_column(column, justify="right")
    for index, rank in enumerate(ranks):
        held = rank.held
        sizes = [held.weights, held.gradients, held.optimizer_states, rank.activations, rank.peak, rank.budget]
        measured = "" if rank.measured is None else size_text(rank.measured)
        table.add_row(str(index), *map(size_text, sizes), measured)
    return table
