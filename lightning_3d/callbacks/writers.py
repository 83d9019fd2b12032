"""Where rows of metrics go besides loggers: a file of comma-separated values, and a table on a terminal."""

from __future__ import annotations

import csv
from collections.abc import Mapping
from pathlib import Path

from rich.console import Console
from rich.live import Live
from rich.table import Table

from lightning_3d.memory.rank_memory import size_text

Row = Mapping[str, float | None]
"""Name of a metric -> its value, None if it was not measured; all rows of a run have the same names."""


class RowFile:
    """Appends rows to a file.

    Args:
        anew: Whether what is there goes.
    """

    def __init__(self, path: Path, *, anew: bool) -> None:
        self._path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        if anew:
            path.unlink(missing_ok=True)
        self._columns = [] if not path.exists() else next(csv.reader(path.read_text().splitlines()), [])

    def write(self, row: Row) -> None:
        """Add a line, below the names of its columns where these are others than before."""
        with self._path.open("a", newline="") as file:
            writer = csv.DictWriter(file, list(row))
            if self._columns != list(row):
                writer.writeheader()
                self._columns = list(row)
            writer.writerow(row)


class RowTable:
    """Shows the last row on a terminal.

    Args:
        is_live: Whether each row takes the place of the one before; else it is printed below, as beside a progress bar.
    """

    def __init__(self, console: Console, *, is_live: bool) -> None:
        self._console = console
        self._live = Live(console=console, auto_refresh=False) if is_live else None
        if self._live is not None:
            self._live.start()

    def show(self, row: Row) -> None:
        """Show a row."""
        table = row_table(row)
        if self._live is None:
            self._console.print(table)
        else:
            self._live.update(table, refresh=True)

    def close(self) -> None:
        """Leave the last row there."""
        if self._live is not None:
            self._live.stop()


def row_table(row: Row) -> Table:
    """A line for each metric."""
    table = Table("telemetry", f"step {row['step']}", show_header=True)
    for name, value in row.items():
        if value is not None and name != "step":
            table.add_row(name, _text(name, value, row.get("time/step") or 0.0))
    return table


def _text(name: str, value: float, step: float) -> str:
    if name.startswith("memory/"):
        return size_text(int(value))
    if name.startswith("time/"):
        return f"{value * 1e3:,.1f} ms {value / step:5.0%}"
    return f"{value:.1%}" if name == "mfu" else f"{value:,.4g}"
