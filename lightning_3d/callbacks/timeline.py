"""A callback that draws the timeline of a pipeline schedule: planned beside measured. Needs matplotlib."""

from __future__ import annotations

from pathlib import Path

import lightning as L

from lightning_3d.distributed.agreement import gather_objects
from lightning_3d.errors import StepError
from lightning_3d.pipeline.spans import SpanRecorder, Timeline
from lightning_3d.strategy import ThreeDStrategy


class ScheduleTimeline(L.Callback):
    """Draws one training step: one row per rank of the first pipeline, one box per microbatch, bubbles left white.

    Args:
        path: Where rank 0 writes the picture; its suffix chooses the format.
        step: Which batch of the run is drawn, counted from 0; the first ones warm up.

    Raises:
        ConfigError: matplotlib is not installed.
        StepError: the strategy has no pipeline, or runs the step inline.
    """

    def __init__(self, path: str | Path = "timeline.png", step: int = 2) -> None:
        from lightning_3d.callbacks.drawing import save, timeline_figure  # here, as matplotlib may not be installed

        self._draw, self._save = timeline_figure, save
        self.path, self.step = Path(path), step
        self._num_steps = 0  # of the run, which may have many epochs
        self._recorder: SpanRecorder | None = None
        self.timeline: Timeline | None = None
        """The timeline that was drawn, on all ranks of the first pipeline."""

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        strategy = trainer.strategy
        if not isinstance(strategy, ThreeDStrategy) or strategy.mesh.shape.pp == 1:
            raise StepError("ScheduleTimeline draws a pipeline: set strategy='3d' with pipeline_parallel_size > 1")
        self._num_steps = 0

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: object, batch_idx: int
    ) -> None:
        if self._num_steps == self.step:
            strategy = self._strategy(trainer)
            self._recorder = SpanRecorder(strategy.root_device)
            strategy.run.measure_steps(self._recorder)

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: object, batch: object, batch_idx: int
    ) -> None:
        if self._recorder is not None:
            self.timeline = self._gathered(self._strategy(trainer), self._recorder)
            self._recorder = None
            if trainer.is_global_zero:
                self._save(self._draw(self.timeline), self.path)
        self._num_steps += 1

    @staticmethod
    def _gathered(strategy: ThreeDStrategy, recorder: SpanRecorder) -> Timeline:
        """The spans that the ranks of this pipeline measured."""
        strategy.run.measure_steps(None)
        if not (runs := recorder.runs()):
            raise StepError("A timeline shows the schedule of a pipeline in microbatches, which this step has not run.")
        measured = gather_objects(runs[-1], strategy.mesh.group("pp"))
        return Timeline(name=strategy.plan.schedule, planned=recorder.planned, measured=tuple(measured))

    @staticmethod
    def _strategy(trainer: L.Trainer) -> ThreeDStrategy:
        assert isinstance(trainer.strategy, ThreeDStrategy)
        return trainer.strategy
