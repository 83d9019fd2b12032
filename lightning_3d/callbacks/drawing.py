"""The picture of a timeline: planned above measured. Needs matplotlib."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from lightning_3d.pipeline.spans import Span, Timeline, idle_share
from lightning_3d.planning.schedule_order import Kind

_COLOURS: dict[Kind, str] = {"forward": "#4c78a8", "backward": "#f58518", "input": "#eeca3b", "weight": "#54a24b"}
_LABELS: dict[Kind, str] = {
    "forward": "forward",
    "backward": "backward",
    "input": "gradients of inputs",
    "weight": "gradients of weights",
}


def draw_timeline(timeline: Timeline, path: Path) -> None:
    """Draw planned above measured."""
    rows = len(timeline.measured)
    figure = Figure(figsize=(14, 2 + 1.1 * rows), layout="constrained")
    FigureCanvasAgg(figure)  # draws to memory; pyplot would choose a backend for the whole process
    above, below = figure.subplots(2, 1)
    _draw(above, timeline.planned, "forwards")
    _draw(below, [[_scaled(span, 1e3) for span in rank] for rank in timeline.measured], "milliseconds")
    above.set_title(f"{timeline.name}, planned: {idle_share(timeline.planned):.0%} idle")
    below.set_title(f"{timeline.name}, measured: {idle_share(timeline.measured):.0%} idle")
    kinds = {span.kind for rank in timeline.measured for span in rank}
    handles = [Patch(color=_COLOURS[kind], label=_LABELS[kind]) for kind in _COLOURS if kind in kinds]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles))
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=100)


def _draw(axes: Axes, ranks: Sequence[Sequence[Span]], unit: str) -> None:
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
    return Span(
        kind=span.kind,
        stage=span.stage,
        microbatch=span.microbatch,
        start=span.start * factor,
        end=span.end * factor,
    )
