"""Measuring when a schedule computes what."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from lightning_3d.planning.schedule_order import Kind
from lightning_3d.planning.timing import Span


@dataclass(frozen=True, kw_only=True)
class Timeline:
    """One step of a schedule."""

    name: str
    planned: tuple[tuple[Span, ...], ...]
    """By index on the pp axis; a forward takes one unit of time."""
    measured: tuple[tuple[Span, ...], ...]
    """By index on the pp axis, in seconds."""


class SpanRecorder:
    """Measures the computations of one step on this rank.

    Args:
        device: Waited for at the start and end of every computation, so a measured step on an accelerator is slower
            than others.
    """

    def __init__(self, device: torch.device) -> None:
        self.spans: list[Span] = []
        self._device = device
        self._origin = 0.0

    def begin(self) -> None:
        """Start the clock; all ranks of a pipeline call it at the same moment."""
        self._origin = self._now()

    @contextmanager
    def measure(self, kind: Kind, stage: int, microbatch: int) -> Iterator[None]:
        """Measure what runs inside."""
        start = self._now()
        yield
        end = self._now()
        self.spans.append(
            Span(kind=kind, stage=stage, microbatch=microbatch, start=start - self._origin, end=end - self._origin)
        )

    def _now(self) -> float:
        if self._device.type != "cpu":
            torch.accelerator.synchronize(self._device)
        return time.perf_counter()
