"""A callback that draws the timeline of a pipeline schedule: planned beside measured. Needs matplotlib."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning as L
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from lightning_3d.errors import StepError
from lightning_3d.pipeline.spans import Span, Timeline, idle_share
from lightning_3d.planning.schedule_order import Kind
from lightning_3d.strategy import ThreeDStrategy

_COLOURS: dict[Kind, str] = {"forward": "#4c78a8", "backward": "#f58518", "input": "#eeca3b", "weight": "#54a24b"}
_LABELS: dict[Kind, str] = {
    "forward": "forward",
    "backward": "backward",
    "input": "gradients of inputs",
    "weight": "gradients of weights",
}


class ScheduleTimeline(L.Callback):
    """Draws one training step: one row per rank of the first pipeline, one box per microbatch, bubbles left white.

    Args:
        path: Where rank 0 writes the picture; its suffix chooses the format.
        step: Which batch of the run is drawn, counted from 0; the first ones warm up.

    Raises:
        StepError: the strategy has no pipeline.
    """

    def __init__(self, path: str | Path = "timeline.png", step: int = 2) -> None:
        self.path, self.step = Path(path), step
        self.timeline: Timeline | None = None
        """The timeline that was drawn, on all ranks of the first pipeline."""

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        strategy = trainer.strategy
        if not isinstance(strategy, ThreeDStrategy) or strategy.mesh.shape.pp == 1:
            raise StepError("ScheduleTimeline draws a pipeline: set strategy='3d' with pipeline_parallel_size > 1")

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if batch_idx == self.step:
            self._strategy(trainer).start_timeline()

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if batch_idx == self.step:
            self.timeline = self._strategy(trainer).finish_timeline()
            if trainer.is_global_zero:
                draw_timeline(self.timeline, self.path)

    @staticmethod
    def _strategy(trainer: L.Trainer) -> ThreeDStrategy:
        assert isinstance(trainer.strategy, ThreeDStrategy)
        return trainer.strategy


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
