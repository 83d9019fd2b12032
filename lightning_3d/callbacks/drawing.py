"""Pictures, by matplotlib, without which this file is not to be imported."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from lightning_3d.errors import ConfigError
from lightning_3d.pipeline.spans import Timeline
from lightning_3d.planning.schedule_order import Kind
from lightning_3d.planning.timing import Span, idle_share

try:
    from matplotlib.axes import Axes
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
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


Panel = tuple[str, Sequence[Sequence[Span]], str]
"""A title, the computations of each rank, and the unit of their times."""


def draw_spans(panels: Sequence[Panel], path: Path) -> None:
    """Draw timelines one above the other: a row per rank, a box per microbatch, in white the time that a rank waits."""
    rows = sum(len(ranks) for _, ranks, _ in panels)
    figure = _figure(1 + 0.6 * rows + 0.7 * len(panels))
    for axes, (title, ranks, unit) in zip(figure.subplots(len(panels), 1, squeeze=False)[:, 0], panels, strict=True):
        _draw_ranks(axes, ranks, unit)
        axes.set_title(f"{title}: {idle_share(ranks):.0%} idle")
    kinds = {span.kind for _, ranks, _ in panels for rank in ranks for span in rank}
    handles = [Patch(color=_COLOURS[kind], label=_LABELS[kind]) for kind in _COLOURS if kind in kinds]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles))
    _save(figure, path)


def draw_timeline(timeline: Timeline, path: Path) -> None:
    """Draw planned above measured."""
    measured = [[_scaled(span, 1e3) for span in rank] for rank in timeline.measured]
    planned = (f"{timeline.name}, planned", timeline.planned, "forwards")
    draw_spans([planned, (f"{timeline.name}, measured", measured, "milliseconds")], path)


def _figure(height: float) -> Figure:
    figure = Figure(figsize=(14, height), layout="constrained")
    FigureCanvasAgg(figure)  # draws to memory; pyplot would choose a backend for the whole process
    return figure


def _save(figure: Figure, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=100)


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
