"""What layouts refuse, in the tables of the documentation."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Refusal:
    """A layout that does not take a program or a module."""

    message: str
    """Part of the error on every rank, a regular expression."""

    reason: str
    """In the table's words."""


def refused_or(refused: Mapping[str, Refusal], layout: str, works: str) -> str:
    """How a table puts what a layout makes of something.

    Args:
        works: For layouts that do not refuse it.
    """
    return f"refused: {refused[layout].reason}" if layout in refused else works


def markdown_table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table as Markdown has it."""
    first, *others = (f"| {' | '.join(cells)} |\n" for cells in (header, *rows))
    return "".join([first, f"|{'---|' * len(header)}\n", *others])
