"""The parts that this rank steps, dealt to windows of bounded size that are stepped one after the other."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from torch import Tensor, nn


@dataclass(frozen=True, eq=False, kw_only=True)
class Part:
    """A parameter that is stepped now, on this rank."""

    parameter: nn.Parameter
    """The module's."""
    values: nn.Parameter
    """The plain part of it that this rank steps."""
    gradient: Tensor
    """Like `values`, in 16 bits or in theirs."""
    group: int
    """Index of its group in the optimizer."""
    rounded: Tensor | None = None
    """The 16-bit part of the parameter, where `values` are its master weights."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Piece:
    """All or some rows of a part."""

    part: Part
    rows: slice | None = None
    """None: all of it."""

    @property
    def is_last(self) -> bool:
        """Whether the pieces of its part end here."""
        return self.rows is None or self.rows.stop >= self.part.values.shape[0]

    @property
    def values(self) -> Tensor:
        """A view of the part's."""
        return self.of(self.part.values.detach())

    @property
    def gradient(self) -> Tensor:
        """A view of the part's."""
        return self.of(self.part.gradient)

    @property
    def rounded(self) -> Tensor | None:
        """A view of the part's."""
        return None if self.part.rounded is None else self.of(self.part.rounded)

    def of(self, tensor: Tensor) -> Tensor:
        """The rows of a tensor like the part."""
        return tensor if self.rows is None else tensor[self.rows]


def deal(parts: Iterable[Part], num_bytes: float) -> list[list[Piece]]:
    """Deal parts to windows, in their order; at least one window, which may be empty.

    Args:
        num_bytes: Of parameters, which a window exceeds only where one row alone does.
    """
    windows: list[list[Piece]] = [[]]
    filled = 0
    for part in parts:
        for piece in _pieces(part, num_bytes):
            if windows[-1] and filled + piece.values.nbytes > num_bytes:
                windows.append([])
                filled = 0
            windows[-1].append(piece)
            filled += piece.values.nbytes
    return windows


def _pieces(part: Part, num_bytes: float) -> Iterator[Piece]:
    if part.values.nbytes <= num_bytes or part.values.dim() == 0:
        yield Piece(part=part)
        return
    num_rows = part.values.shape[0]
    fitting = max(1, int(num_bytes * num_rows // part.values.nbytes))
    for start in range(0, num_rows, fitting):
        yield Piece(part=part, rows=slice(start, min(start + fitting, num_rows)))
