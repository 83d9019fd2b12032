"""When a schedule computes what: as planned in slots, and as measured in seconds."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from lightning_3d.planning.schedule_order import Computation, Kind


@dataclass(frozen=True, kw_only=True)
class Span:
    """One computation of one microbatch on one stage."""

    kind: Kind
    stage: int
    microbatch: int
    start: float
    """In seconds since the step began, or in units of one forward if planned."""
    end: float


@dataclass(frozen=True, kw_only=True)
class Timeline:
    """One step of a schedule."""

    name: str
    planned: tuple[tuple[Span, ...], ...]
    """By index on the pp axis."""
    measured: tuple[tuple[Span, ...], ...]
    """By index on the pp axis."""


_LENGTHS: Mapping[Kind, float] = {"forward": 1.0, "input": 1.0, "weight": 1.0, "backward": 2.0}


def play(order: Sequence[Sequence[Computation]]) -> tuple[tuple[Span, ...], ...]:
    """Let every rank compute in its order, each computation as early as its inputs allow, without communication.

    A forward takes one unit of time and a backward two, one for the gradients of inputs and one for those of weights.
    """
    num_stages = max(c.stage for rank in order for c in rank) + 1
    ends: dict[Computation, float] = {}
    queues = [deque(rank) for rank in order]
    spans: list[list[Span]] = [[] for _ in order]
    while any(queues):
        for queue, played in zip(queues, spans, strict=True):
            while queue and all(need in ends for need in _needs(queue[0], num_stages)):
                computation = queue.popleft()
                inputs = (ends[need] for need in _needs(computation, num_stages))
                start = max([played[-1].end if played else 0.0, *inputs])
                end = start + _LENGTHS[computation.kind]
                kind, stage, microbatch = computation
                ends[Computation("input" if kind == "backward" else kind, stage, microbatch)] = end
                played.append(Span(kind=kind, stage=stage, microbatch=microbatch, start=start, end=end))
    return tuple(tuple(played) for played in spans)


def _needs(computation: Computation, num_stages: int) -> list[Computation]:
    """The computations that must have ended before."""
    kind, stage, microbatch = computation
    if kind == "forward":
        return [Computation("forward", stage - 1, microbatch)] if stage > 0 else []
    if kind == "weight":
        return [Computation("input", stage, microbatch)]
    following = [Computation("input", stage + 1, microbatch)] if stage < num_stages - 1 else []
    return [Computation("forward", stage, microbatch), *following]


def idle_share(spans: Sequence[Sequence[Span]]) -> float:
    """The part of the ranks' time between the first start and the last end in which they compute nothing, 0 to 1."""
    flat = [span for rank in spans for span in rank]
    total = max(span.end for span in flat) - min(span.start for span in flat)
    return 1.0 - sum(span.end - span.start for span in flat) / (total * len(spans))


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
