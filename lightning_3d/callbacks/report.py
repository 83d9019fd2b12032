"""A callback that writes one page on a run: the plan, what ranks hold, and what was measured. Needs matplotlib."""

from __future__ import annotations

import platform
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

import lightning as L
import torch

from lightning_3d.callbacks.rows import row_table
from lightning_3d.callbacks.telemetry import Telemetry
from lightning_3d.callbacks.timeline import ScheduleTimeline
from lightning_3d.errors import StepError
from lightning_3d.run.report import report_table
from lightning_3d.strategy import ThreeDStrategy
from lightning_3d.torch_internals.lightning_helpers import callbacks_of

if TYPE_CHECKING:
    from lightning_3d.callbacks.page import Section


class Report(L.Callback):
    """Writes a page when a fit ends: the plan and its pictures, what every rank holds, logged values, the environment.

    It has the timeline that a `ScheduleTimeline` measured, or the speed, times and memory that a `Telemetry` did, and
    with `activations.budget` the predicted memory of the ranks.

    Args:
        path: Where rank 0 writes it; one file, which needs no other.

    Raises:
        ConfigError: matplotlib is not installed.
        StepError: the strategy is another one.
    """

    def __init__(self, path: str | Path = "report.html") -> None:
        import lightning_3d.callbacks.page  # noqa: F401  # raises before the fit where there is no matplotlib

        self.path = Path(path)

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if not isinstance(trainer.strategy, ThreeDStrategy):
            raise StepError("Report shows the plan of a strategy: set strategy='3d'")

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        strategy = trainer.strategy
        assert isinstance(strategy, ThreeDStrategy)
        plan, held = strategy.plan, strategy.report()
        if not trainer.is_global_zero:
            return
        from lightning_3d.callbacks.drawing import timeline_figure
        from lightning_3d.callbacks.page import plan_sections, write_page

        sections = [*plan_sections(plan), ("What each rank holds", report_table(held))]
        for callback in callbacks_of(trainer):
            if isinstance(callback, ScheduleTimeline) and callback.timeline is not None:
                sections.append(("A step as it was measured", timeline_figure(callback.timeline)))
        telemetry = next((each for each in callbacks_of(trainer) if isinstance(each, Telemetry)), None)
        sections += _measured(telemetry)
        logged = {name: f"{float(value):.6g}" for name, value in trainer.callback_metrics.items()}
        sections.append((f"Logged, after {trainer.global_step} steps", _lines(logged)))
        sections.append(("Environment", _lines(_environment(strategy.root_device))))
        write_page(self.path, f"{type(pl_module).__name__} on {plan.shape.world_size} ranks", sections)


def _measured(telemetry: Telemetry | None) -> list[Section]:
    if telemetry is None:
        how = "add Telemetry() to the Trainer's callbacks, in the place of a ScheduleTimeline"
        return [("Speed, time and memory", f"Not measured: {how}.")]
    if not telemetry.rows:
        return [("Speed, time and memory", "The run ended before Telemetry had a row: set its every_n_steps lower.")]
    from lightning_3d.callbacks.drawing import peaks_figure, speed_figure, times_figure

    sections: list[Section] = [("Telemetry", row_table(telemetry.rows[-1])), ("Speed", speed_figure(telemetry.rows))]
    if telemetry.num_measured:
        sections.append(("Time of a step", times_figure(telemetry.ranks, telemetry.num_measured)))
    return [*sections, ("Measured memory", peaks_figure(telemetry.ranks))]


def _lines(found: dict[str, str]) -> str:
    return "\n".join(f"{name}: {value}" for name, value in found.items())


def _environment(device: torch.device) -> dict[str, str]:
    packages = {name: version(name) for name in ("lightning-3d", "torch", "lightning")}
    name = "CPU" if device.type == "cpu" else torch.get_device_module(device).get_device_name(device)
    return {"python": f"{platform.python_version()} on {platform.platform()}", **packages, "device of rank 0": name}
