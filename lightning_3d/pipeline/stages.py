"""From a trace and an assignment of blocks to stages: what each stage runs and what crosses each boundary.

Pure: a function of the trace and the assignment alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from lightning_3d.errors import PlanError
from lightning_3d.pipeline.ghost import TensorMeta
from lightning_3d.pipeline.trace import Event, Trace


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
    """
    made: dict[int, int] = {}
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
        for i in event.inputs:
            used[i] = max(used.get(i, 0), stage)
        for i in event.outputs:
            made[i] = stage
    for i in trace.returned:
        used[i] = num_stages - 1
    crossings = tuple(tuple(sorted(i for i in made if made[i] <= k < used.get(i, -1))) for k in range(num_stages - 1))
    return StageFlow(trace=trace, num_stages=num_stages, event_stages=tuple(event_stages), crossings=crossings)


def _stage_of_call(event: Event, stages_of_calls: Mapping[str, tuple[int, ...]]) -> int:
    stages = stages_of_calls[event.name]
    return stages[min(event.call_index, len(stages) - 1)]
