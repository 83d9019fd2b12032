"""When a schedule computes what, by the times of its stages, and what each rank sends in a step."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lightning_3d.planning.held import StateMemory
from lightning_3d.planning.plan import Plan
from lightning_3d.planning.schedule_order import Computation, Kind, schedule_order

_SHARES: Mapping[Kind, float] = {"forward": 1 / 3, "backward": 2 / 3, "input": 1 / 3, "weight": 1 / 3}
"""The part of a stage's time for a microbatch that a computation takes: products of matrices come three times."""


@dataclass(frozen=True, kw_only=True)
class Span:
    """One computation of one microbatch on one stage."""

    kind: Kind
    stage: int
    microbatch: int
    start: float
    """In seconds since the step began, or in the unit of the stages' times if planned."""
    end: float


def play(
    orders: Sequence[Sequence[Computation]], stage_times: Sequence[float] | None = None
) -> tuple[tuple[Span, ...], ...]:
    """Let every rank compute in its order, each computation as early as its inputs allow, without communication.

    Args:
        stage_times: Of a forward and a backward of one microbatch on each stage; by default 3, of which a forward is 1.
    """
    num_stages = max(computation.stage for order in orders for computation in order) + 1
    times = [3.0] * num_stages if stage_times is None else stage_times
    ends: dict[Computation, float] = {}
    queues = [deque(order) for order in orders]
    spans: list[list[Span]] = [[] for _ in orders]
    while any(queues):
        for queue, played in zip(queues, spans, strict=True):
            while queue and ends.keys() >= (needed := _needed(queue[0], num_stages)):
                computation = kind, stage, microbatch = queue.popleft()
                start = max([played[-1].end if played else 0.0, *map(ends.__getitem__, needed)])
                end = start + _SHARES[kind] * times[stage]
                ends[_done(computation)] = end
                played.append(Span(kind=kind, stage=stage, microbatch=microbatch, start=start, end=end))
    return tuple(tuple(played) for played in spans)


def idle_share(spans: Sequence[Sequence[Span]]) -> float:
    """The part of the ranks' time between the first start and the last end in which they compute nothing, 0 to 1."""
    flat = [span for rank in spans for span in rank]
    total = max(span.end for span in flat) - min(span.start for span in flat)
    return 1.0 - sum(span.end - span.start for span in flat) / (total * len(spans)) if total else 0.0


def bubble(spans: Sequence[Sequence[Span]], rank: int) -> float:
    """The time in which a rank computes nothing, since what it needs is computed, or other ranks have not ended.

    The rest of its time between computations goes into sending and receiving.
    """
    flat = [span for rank in spans for span in rank]
    num_stages = max(span.stage for span in flat) + 1
    ends = {_done(Computation(span.kind, span.stage, span.microbatch)): span.end for span in flat}
    waited, free = 0.0, 0.0
    for span in spans[rank]:
        needed = _needed(Computation(span.kind, span.stage, span.microbatch), num_stages)
        ready = max(map(ends.__getitem__, needed), default=0.0)
        waited += max(min(ready, span.start) - free, 0.0)
        free = span.end
    return waited + max(span.end for span in flat) - free


def makespan(
    schedule: str, stage_ranks: Sequence[int], num_microbatches: int, stage_times: Sequence[float]
) -> tuple[float, float]:
    """The time of a training step, and the part of it in which ranks wait for others, on average.

    Args:
        schedule: A value of ``pipeline.schedule``.
        stage_ranks: Index on the pp axis of the rank of each stage.
        stage_times: Of a forward and a backward of one microbatch on each stage.
    """
    spans = play(schedule_order(schedule, stage_ranks, num_microbatches), stage_times)
    return max(span.end for rank in spans for span in rank), idle_share(spans)


def _done(computation: Computation) -> Computation:
    """The computation as others need it: they need of a whole backward its gradients of inputs."""
    return computation._replace(kind="input") if computation.kind == "backward" else computation


def _needed(computation: Computation, num_stages: int) -> set[Computation]:
    """The computations that must have ended before."""
    kind, stage, microbatch = computation
    if kind == "forward":
        return {Computation("forward", stage - 1, microbatch)} if stage else set()
    if kind == "weight":
        return {Computation("input", stage, microbatch)}
    after = {Computation("input", stage + 1, microbatch)} if stage + 1 < num_stages else set()
    return {Computation("forward", stage, microbatch), *after}


def sent_bytes(plan: Plan, state: StateMemory) -> dict[str, int]:
    """Axis of the mesh -> the most bytes that a rank sends over it in a training step, by rings."""
    found, num = dict[str, int](), plan.num_microbatches
    if plan.shape.pp > 1:
        of_stages = [stage.bytes_sent for stage in plan.stages]
        both = [sent + received for sent, received in zip(of_stages, [0, *of_stages[:-1]], strict=True)]
        found["pp"] = num * max(sum(both[stage] for stage in plan.stages_on(rank)) for rank in range(plan.shape.pp))
    if plan.shape.tp > 1:
        of_ranks = [
            sum(block.tensor.communicated_bytes for block in plan.blocks_on(rank) if block.tensor is not None)
            for rank in range(plan.shape.pp)
        ]
        found["tp"] = num * max(of_ranks)
    if plan.shape.size("state") > 1:
        found["dp"] = sum(int(num_bytes) for _, num_bytes in sent_by_replicas(plan, state))
    return found


def sent_by_replicas(plan: Plan, state: StateMemory) -> list[tuple[str, float]]:
    """The kinds of collectives of replicas in a step, and the bytes that a rank sends in all of each, by rings."""
    weights, num_sharing = max(state.weights), state.num_sharing
    found = list[tuple[str, float]]()
    if num_sharing > 1:
        row = weights * (num_sharing - 1) / num_sharing
        found += [("reduce-scatter", row), ("all-gather", row)]
        found += [("all-gather", row)] * (plan.zero_stage == 3 and state.gathers_again)
    groups = plan.shape.size("state") // num_sharing
    if groups > 1:  # of shards between the groups that share
        found.append(("all-reduce", 2 * weights / num_sharing * (groups - 1) / groups))
    return found
