"""From a trace and an assignment of blocks to stages: what each stage runs and what crosses each boundary.

Pure: a function of the trace and the assignment alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from lightning_3d.errors import PlanError, TraceError
from lightning_3d.trace.ghost import TensorMeta
from lightning_3d.trace.trace import Event, Trace


@dataclass(frozen=True, kw_only=True)
class StageFlow:
    """A trace cut into stages."""

    trace: Trace
    num_stages: int
    event_stages: tuple[int, ...]
    """Stage of each event."""
    crossings: tuple[tuple[int, ...], ...]
    """For each boundary between stage k and k + 1, the ids of the tensors sent, ascending."""

    def sent(self, stage: int) -> tuple[int, ...]:
        """Ids that ``stage`` sends to the next."""
        return self.crossings[stage] if stage < self.num_stages - 1 else ()

    def received(self, stage: int) -> tuple[int, ...]:
        """Ids that ``stage`` receives from the one before."""
        return self.crossings[stage - 1] if stage > 0 else ()

    def metas(self, ids: tuple[int, ...]) -> tuple[TensorMeta, ...]:
        """What is known of these tensors."""
        return tuple(self.trace.tensors[i] for i in ids)


def cut(trace: Trace, stages_of_calls: Mapping[str, tuple[int, ...]], num_stages: int) -> StageFlow:
    """Give every event its stage and find what crosses.

    A glue event belongs to the latest stage that it reads from. A tensor made in stage s and used in stage t > s
    crosses every boundary between them.

    Args:
        stages_of_calls: Block FQN -> stage of its first call, its second, ...; further calls stay on the last one.

    Raises:
        PlanError: a block reads a tensor of a later stage.
        TraceError: a tensor's values depend on something that does not cross: an in-place change of a tensor that it
            shares memory with, or a buffer that a block of another stage changes.
    """
    made: dict[int, int] = {}
    stale: dict[int, Event] = {}  # tensor -> the in-place call on another stage that should have changed it
    used: dict[int, int] = {}
    event_stages = []
    for event in trace.events:
        earliest = max((made[i] for i in event.inputs), default=0)
        stage = _stage_of_call(event, stages_of_calls) if event.is_block else earliest
        if stage < earliest:
            raise PlanError(
                f"Block {event.name} (called at {event.where}) is on pipeline stage {stage} but reads a tensor of stage"
                f" {earliest}. The blocks were called in another order when the stages were planned. Name other blocks"
                " with pipeline.partition='type:REGEX', or use fewer stages."
            )
        event_stages.append(stage)
        _check_inputs(event, stale, trace)
        for i in event.inputs:
            used[i] = max(used.get(i, 0), stage)
        for i in event.outputs:
            made[i] = stage
        stale |= {new: event for old, new in event.aliased.items() if made[old] != stage}
    for i in trace.returned:
        if i in stale and trace.stopped_by is None:
            raise _stale("What the step returns or logs", stale[i])
        used[i] = num_stages - 1
    crossings = tuple(tuple(sorted(i for i in made if made[i] <= k < used.get(i, -1))) for k in range(num_stages - 1))
    return StageFlow(trace=trace, num_stages=num_stages, event_stages=tuple(event_stages), crossings=crossings)


def _check_inputs(event: Event, stale: Mapping[int, Event], trace: Trace) -> None:
    for i in event.inputs:
        if i in stale:
            raise _stale(f"{event.name} (called at {event.where})", stale[i])
    if changed := sorted(trace.changed_buffers.intersection(event.parameters)):
        raise TraceError(
            f"{event.name} (called at {event.where}) reads the buffer {changed[0]}, which its block's forward changes,"
            " but the block may live on another pipeline stage. Return the value from the block's forward."
        )


def _stale(reader: str, change: Event) -> TraceError:
    return TraceError(
        f"{reader} reads a tensor that shares memory with one that {change.name} (called at {change.where}) changes in"
        " place, but the two are made on different pipeline stages, where they don't share memory. Make the change out"
        " of place (x = x + y instead of x += y), or clone() before it."
    )


def _stage_of_call(event: Event, stages_of_calls: Mapping[str, tuple[int, ...]]) -> int:
    stages = stages_of_calls[event.name]
    return stages[min(event.call_index, len(stages) - 1)]
