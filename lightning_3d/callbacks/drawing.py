"""Pictures, by matplotlib, without which this file is not to be imported."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import BinaryIO

from lightning_3d.errors import ConfigError
from lightning_3d.memory.rank_memory import GIB, RankMemory
from lightning_3d.pipeline.spans import Timeline
from lightning_3d.planning.plan import Plan
from lightning_3d.planning.schedule_order import Kind
from lightning_3d.planning.timing import Span, idle_share

try:
    from matplotlib import colormaps
    from matplotlib.axes import Axes
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure as Figure
    from matplotlib.patches import Patch
except ModuleNotFoundError as error:
    raise ConfigError(f'pictures are drawn by matplotlib ({error}): pip install "lightning-3d[pictures]"') from error

_COLOURS: dict[Kind, str] = {"forward": "#4c78a8", "backward": "#f58518", "input": "#eeca3b", "weight": "#54a24b"}
_LABELS: dict[Kind, str] = {
    "forward": "forward",
    "backward": "backward",
    "input": "gradients of inputs",
    "weight": "gradients of weights",
}

_MOST_NUMBERS = 2000  # that are written into a picture
_MOST_LABELS = 24  # side by side

Panel = tuple[str, Sequence[Sequence[Span]], str]
"""A title, the computations of each rank, and the unit of their times."""


def spans_figure(panels: Sequence[Panel]) -> Figure:
    """Timelines one above the other: a row per rank, a box per microbatch, in white the time that a rank waits."""
    rows = sum(len(ranks) for _, ranks, _ in panels)
    figure = _figure(1 + 0.6 * rows + 0.7 * len(panels))
    for axes, (title, ranks, unit) in zip(figure.subplots(len(panels), 1, squeeze=False)[:, 0], panels, strict=True):
        _draw_ranks(axes, ranks, unit)
        axes.set_title(f"{title}: {idle_share(ranks):.0%} idle")
    kinds = {span.kind for _, ranks, _ in panels for rank in ranks for span in rank}
    handles = [Patch(color=_COLOURS[kind], label=_LABELS[kind]) for kind in _COLOURS if kind in kinds]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles))
    return figure


def timeline_figure(timeline: Timeline) -> Figure:
    """A timeline as it was planned, above what was measured."""
    measured = [[_scaled(span, 1e3) for span in rank] for rank in timeline.measured]
    planned = (f"{timeline.name}, planned", timeline.planned, "forwards")
    return spans_figure([planned, (f"{timeline.name}, measured", measured, "milliseconds")])


def memory_figure(ranks: Sequence[RankMemory]) -> Figure:
    """The memory of the ranks of the pp axis at the peak of a step, stacked by kind."""
    figure = _figure(4)
    axes = figure.subplots()
    kinds = {
        "weights": [rank.held.weights for rank in ranks],
        "gradients": [rank.held.gradients for rank in ranks],
        "optimizer states": [rank.held.optimizer_states for rank in ranks],
        "activations and buffers": [rank.activations for rank in ranks],
    }
    unit, name = _memory_unit(max(rank.peak for rank in ranks))
    _stack(axes, {kind: [size / unit for size in sizes] for kind, sizes in kinds.items()}, [*_COLOURS.values()])
    budgets = [rank.budget / unit for rank in ranks if rank.budget is not None]
    if budgets:
        axes.axhline(min(budgets), color="black", linestyle="dashed", label="budget")
    axes.set(xlabel="pipeline rank", ylabel=name, title="memory at the peak of a training step, as predicted")
    axes.legend()
    return figure


def weights_figure(plan: Plan) -> Figure:
    """The part of every block's parameters that each rank of the first replica holds: a row per block."""
    shape = plan.shape
    rows = []
    for block in plan.blocks:
        share = 1.0 if block.tensor is None else 1 - block.tensor.sharded_share * (1 - 1 / shape.tp)
        holders = plan.ranks_of(block)
        rows.append([share if pp in holders else math.nan for pp in range(shape.pp) for _ in range(shape.tp)])
    figure = _figure(min(1.5 + 0.25 * len(rows), 40))
    axes = figure.subplots()
    axes.imshow(rows, aspect="auto", cmap="Blues", vmin=0, vmax=1.3, interpolation="none")
    columns = range(0, shape.pp * shape.tp, 1 + shape.pp * shape.tp // _MOST_LABELS)
    axes.set_xticks(columns, [f"pp {column // shape.tp}\ntp {column % shape.tp}" for column in columns])
    axes.set_yticks(range(len(rows)), [block.fqn for block in plan.blocks])
    for row, values in enumerate(rows if len(rows) * shape.pp * shape.tp <= _MOST_NUMBERS else ()):
        for column, share in enumerate(values):
            if not math.isnan(share):
                axes.text(column, row, f"{share:.0%}", ha="center", va="center", fontsize=7)

    held = "hold it together, by ZeRO 3" if plan.zero_stage == 3 else "have the same"
    number = shape.size("samples")
    replicas = f"; {number} replicas {held}" if number > 1 else ""
    axes.set_title(f"the part of each block's parameters that a rank holds{replicas}")
    return figure


def budget_figure(points: Sequence[tuple[int, float]]) -> Figure:
    """The peak of a rank's memory, in bytes, against the share of operations that are computed again for it."""
    figure = _figure(4)
    axes = figure.subplots()
    axes.plot([size / GIB for size, _ in points], [100 * share for _, share in points], "o-", color="#4c78a8")
    axes.set(
        xlabel="peak of the rank that takes the most, GiB",
        ylabel="operations computed again, %",
        title="what activations.budget costs with activations.recompute: auto",
    )
    return figure


def scaling_figure(points: Mapping[int, float]) -> Figure:
    """Samples per second by the number of ranks, beside a line of as many per rank as the fewest ranks reach."""
    figure = _figure(4)
    axes = figure.subplots()
    ranks = sorted(points)
    axes.loglog(ranks, [points[size] for size in ranks], "o-", color="#4c78a8", label="predicted")
    ideal = [size * points[ranks[0]] / ranks[0] for size in ranks]
    axes.loglog(ranks, ideal, color="black", linestyle="dashed", label=f"as many per rank as with {ranks[0]}")
    axes.set_xticks(ranks, [str(size) for size in ranks])
    axes.minorticks_off()
    axes.set(xlabel="ranks", ylabel="samples per second", title="a step of more ranks, as predicted")
    axes.legend()
    return figure


def speed_figure(rows: Sequence[Mapping[str, float]]) -> Figure:
    """Tokens per second over the steps of a run, or samples where there are none."""
    figure = _figure(4)
    axes = figure.subplots()
    name = "tokens_per_second" if "tokens_per_second" in rows[-1] else "samples_per_second"
    known = [row for row in rows if name in row]
    axes.plot([row["step"] for row in known], [row[name] for row in known], "o-", color="#4c78a8")
    axes.set_ylim(bottom=0)
    axes.set(xlabel="step", ylabel=name.replace("_", " "), title="speed of all replicas, as it was measured")
    return figure


def times_figure(ranks: Sequence[Mapping[str, float]], num_steps: int) -> Figure:
    """The parts of each rank's time, stacked.

    Args:
        ranks: ``time/<part>`` -> seconds of all measured steps together.
        num_steps: How many of them there were.
    """
    figure = _figure(4)
    axes = figure.subplots()
    parts = [name for name in ranks[0] if name.startswith("time/") and name != "time/step"]
    times = {name.removeprefix("time/"): [1e3 * rank[name] / num_steps for rank in ranks] for name in parts}
    _stack(axes, times, colormaps["tab20"].colors)  # type: ignore[attr-defined]  # of a ListedColormap
    axes.set(
        xlabel="rank",
        ylabel="milliseconds",
        title=f"where the time of a step went, as a mean of {num_steps} that were measured",
    )
    figure.legend(loc="outside right upper")
    return figure


def peaks_figure(ranks: Sequence[Mapping[str, float]]) -> Figure:
    """The measured peak of each rank's memory: of its device, or of the host where torch counts no device's."""
    figure = _figure(4)
    axes = figure.subplots()
    place = "device" if "memory/device_peak" in ranks[0] else "host"
    peaks = [rank[f"memory/{place}_peak"] for rank in ranks]
    unit, name = _memory_unit(max(peaks))
    _stack(axes, {place: [peak / unit for peak in peaks]}, [*_COLOURS.values()])
    axes.set(xlabel="rank", ylabel=name, title=f"peak of the memory of the {place}, as it was measured")
    return figure


def save(figure: Figure, file: Path | BinaryIO) -> None:
    """Write a picture, into a folder that is made if there is none; into a stream as PNG."""
    if isinstance(file, Path):
        file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, dpi=80)


def _figure(height: float) -> Figure:
    figure = Figure(figsize=(14, height), layout="constrained")
    FigureCanvasAgg(figure)  # draws to memory; pyplot would choose a backend for the whole process
    return figure


def _memory_unit(most: float) -> tuple[int, str]:
    return (GIB, "GiB") if most >= GIB else (2**20, "MiB")


def _stack(axes: Axes, parts: Mapping[str, Sequence[float]], colours: Sequence[object]) -> None:
    """Draw a bar for each rank, of its parts one above the other."""
    num_ranks = len(next(iter(parts.values())))
    bottoms = [0.0] * num_ranks
    for (part, sizes), colour in zip(parts.items(), colours, strict=False):
        axes.bar(range(num_ranks), sizes, width=0.4, bottom=bottoms, color=colour, label=part)
        bottoms = [bottom + size for bottom, size in zip(bottoms, sizes, strict=True)]
    axes.set_xticks(range(0, num_ranks, 1 + num_ranks // _MOST_LABELS))


def _draw_ranks(axes: Axes, ranks: Sequence[Sequence[Span]], unit: str) -> None:
    num_stages = max(span.stage for rank in ranks for span in rank) + 1
    for row, spans in enumerate(ranks):
        for span in spans:
            width = span.end - span.start
            shade = 1.0 if num_stages == len(ranks) else 1.0 - 0.45 * (span.stage >= len(ranks))
            axes.barh(
                row, width, left=span.start, height=0.9, color=_COLOURS[span.kind], alpha=shade, edgecolor="white"
            )
            axes.text(span.start + width / 2, row, str(span.microbatch), ha="center", va="center", fontsize=7)
    axes.set_yticks(range(len(ranks)), [f"rank {row}" for row in range(len(ranks))])
    axes.invert_yaxis()
    axes.set_xlabel(unit)


def _scaled(span: Span, factor: float) -> Span:
    return replace(span, start=span.start * factor, end=span.end * factor)
