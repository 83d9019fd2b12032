"""Rows of telemetry: the metrics of all ranks, from what each of them measured, in a file and in a table."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.table import Table

from lightning_3d.distributed.axes import ROLES
from lightning_3d.distributed.mesh import MeshShape
from lightning_3d.memory.rank_memory import size_text

Row = Mapping[str, float | None]
"""Name of a metric -> its value, None if it was not measured; all rows of a run have the same names."""


def rates(ranks: Sequence[Mapping[str, float]], shape: MeshShape, peak: float | None) -> dict[str, float | None]:
    """The work of all ranks by time.

    Args:
        ranks: Of each rank since the last row ``steps``, ``samples``, ``tokens`` and ``seconds``; and likewise
            ``counted_flops`` and so on of the last step in which operations were counted, if there was one.
        peak: Of one device, in TFLOP/s.
    """
    replicas = [ranks[first] for first, *_ in shape.ranks_along(ROLES["replica"])]
    unit = "tokens" if any(rank["tokens"] for rank in replicas) else "samples"
    done, counted = (sum(rank.get(name, 0) for rank in replicas) for name in (unit, f"counted_{unit}"))
    seconds = max(rank["seconds"] for rank in ranks)
    flops = sum(rank.get("counted_flops", 0) for rank in ranks)
    tflops = flops / counted * done / seconds / shape.world_size / 1e12 if counted else None
    found: dict[str, float | None] = {"seconds_per_step": seconds / ranks[0]["steps"]}
    found["samples_per_second"] = sum(rank["samples"] for rank in replicas) / seconds
    if unit == "tokens":
        found["tokens_per_second"] = done / seconds
    found["tflops_per_device"] = tflops
    if peak is not None:
        found["mfu"] = None if tflops is None else tflops / peak
    return found


def times_and_memory(ranks: Sequence[Mapping[str, float]], phases: Sequence[str]) -> dict[str, float | None]:
    """Times of phases as means over the ranks, memory of the rank with the most."""
    found: dict[str, float | None] = {}
    for name in (f"time/{phase}" for phase in ("step", *phases)):
        times = [rank[name] for rank in ranks if name in rank]
        found[name] = sum(times) / len(times) if times else None
    memory = (name for name in ranks[0] if name.startswith("memory/"))
    return found | {name: max(rank[name] for rank in ranks) for name in memory}


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
