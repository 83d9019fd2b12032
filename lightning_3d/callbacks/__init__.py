"""Callbacks for a Trainer with ``strategy="3d"``."""

from __future__ import annotations

from lightning_3d.callbacks.report import Report
from lightning_3d.callbacks.telemetry import Telemetry
from lightning_3d.callbacks.timeline import ScheduleTimeline

__all__ = ["Report", "ScheduleTimeline", "Telemetry"]
