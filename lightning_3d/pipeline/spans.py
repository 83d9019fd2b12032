"""Measuring when a schedule computes what."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise

import torch

from lightning_3d.planning.schedule_order import Computation, Kind
from lightning_3d.planning.timing import Span


@dataclass(frozen=True, kw_only=True)
class Timeline:
    """One step of a schedule."""

    name: str
    planned: tuple[tuple[Span, ...], ...]
    """By index on the pp axis; a forward takes one unit of time."""
    measured: tuple[tuple[Span, ...], ...]
    """By index on the pp axis, in seconds."""


_Mark = float | torch.Event
"""A moment: seconds of the host's clock, or where the stream of an accelerator is."""


class SpanRecorder:
    """Measures phases of steps and computations of microbatches on this rank, each as long as it takes where it runs.

    Phases follow each other without gaps, so that their times add up to that of all.

    Args:
        device: On an accelerator times are those of the present stream, by events, and no host waits for it until they
            are read.
    """

    def __init__(self, device: torch.device) -> None:
        self.phase = "other"
        """The present one; times count from the first that is entered."""
        self.planned: tuple[tuple[Span, ...], ...] = ()
        """The last schedule that ran, as it was planned."""
        self._device = device
        self._stream = None if device.type == "cpu" else torch.accelerator.current_stream(device)
        self._phases: list[tuple[str, _Mark]] = []
        self._origins: list[_Mark] = []  # of schedules that ran
        self._computations: list[tuple[Computation, int, _Mark, _Mark]] = []  # with the index of the schedule

    def enter(self, phase: str) -> None:
        """End the present phase, and begin another."""
        self.phase = phase
        self._phases.append((phase, self._now()))

    @contextmanager
    def during(self, phase: str) -> Iterator[None]:
        """A phase inside of the present one, which goes on afterwards; work of other streams is in none."""
        if self._stream is not None and torch.accelerator.current_stream(self._device) != self._stream:
            yield
            return
        before = self.phase
        self.enter(phase)
        yield
        self.enter(before)

    def begin(self, planned: tuple[tuple[Span, ...], ...]) -> None:
        """Start the clock of a schedule; all ranks of a pipeline call it at the same moment."""
        self.planned = planned
        self._origins.append(self._now())

    @contextmanager
    def measure(self, kind: Kind, stage: int, microbatch: int) -> Iterator[None]:
        """A computation of the schedule runs inside."""
        with self.during("forward" if kind == "forward" else "backward"):
            start = self._now()
            yield
            computation = Computation(kind, stage, microbatch)
            self._computations.append((computation, len(self._origins) - 1, start, self._now()))

    def seconds(self) -> dict[str, float]:
        """Phase -> its time; the last one only ends the one before it."""
        found: dict[str, float] = {}
        for (phase, start), (_, end) in pairwise(self._phases):
            found[phase] = found.get(phase, 0.0) + _between(start, end)
        return found

    def runs(self) -> list[tuple[Span, ...]]:
        """The computations of each schedule that ran."""
        found: list[list[Span]] = [[] for _ in self._origins]
        for (kind, stage, microbatch), run, start, end in self._computations:
            origin = self._origins[run]
            times = {"start": _between(origin, start), "end": _between(origin, end)}
            found[run].append(Span(kind=kind, stage=stage, microbatch=microbatch, **times))
        return [tuple(spans) for spans in found]

    def _now(self) -> _Mark:
        if self._stream is None:
            return time.perf_counter()
        event = torch.Event(self._device, enable_timing=True)
        event.record(self._stream)
        return event


def _between(start: _Mark, end: _Mark) -> float:
    if isinstance(start, float) or isinstance(end, float):
        assert isinstance(start, float)
        assert isinstance(end, float)
        return end - start
    end.synchronize()
    return float(start.elapsed_time(end)) / 1e3
