"""``lightning-3d timeline``: a picture of what a pipeline's ranks compute when, as a schedule plans it."""

from __future__ import annotations

from pathlib import Path

from jsonargparse import ArgumentParser, Namespace

from lightning_3d.config.pipeline import PipelineConfig, ScheduleName
from lightning_3d.config.settings import ThreeDConfig
from lightning_3d.errors import ConfigError
from lightning_3d.planning.schedule_order import schedule_order
from lightning_3d.planning.timing import idle_share, play

HELP = "Draw the schedule of a pipeline, and say how long its ranks wait."


def add_arguments(group: ArgumentParser) -> None:
    """Give the parser its arguments."""
    group.add_function_arguments(draw_schedule)


def run(chosen: Namespace) -> None:
    """Run it."""
    print(draw_schedule(**chosen))


def draw_schedule(
    schedule: ScheduleName = "1f1b", stages: int = 4, microbatches: int = 8, output: Path = Path("schedule.png")
) -> str:
    """Draw a training step of stages that take equally long, without communication, and describe it.

    Args:
        schedule: A value of pipeline.schedule.
        stages: Of all ranks; the last three schedules have two on each.
        microbatches: Pieces of a batch.
        output: The picture, whose suffix chooses the format.

    Raises:
        ConfigError: The numbers do not fit the schedule, or matplotlib is not installed.
    """
    from lightning_3d.callbacks.drawing import save, spans_figure  # here, as matplotlib may not be installed

    config = PipelineConfig(schedule=schedule, num_microbatches=microbatches)
    num_ranks, rest = divmod(stages, config.num_local_stages)
    if num_ranks < 1 or rest:
        raise ConfigError(f"{stages} stages can't be shared out to ranks of {config.num_local_stages}")
    ThreeDConfig(pipeline_parallel_size=num_ranks, pipeline=config)  # refuses what a fit does
    spans = play(schedule_order(schedule, config.stage_ranks(num_ranks), microbatches))
    end = max(span.end for rank in spans for span in rank)
    title = f"{schedule}, {stages} stages, {microbatches} microbatches"
    save(spans_figure([(title, spans, "forwards of a stage")]), output)
    return f"{output}: a step takes {end:.4g} forwards of a stage, of which a rank waits {idle_share(spans):.1%}"
