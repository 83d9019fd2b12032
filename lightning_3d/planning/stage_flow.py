"""From a trace and an assignment of blocks to stages: what each stage runs and what crosses each boundary.

Pure: a function of the trace and the assignment alone.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from lightning_3d.errors import PlanError, TraceError
from lightning_3d.trace.ghost import TensorMeta
from lightning_3d.trace.side_outputs import SideOutputs
from lightning_3d.trace.trace import Trace, TracedCall


@dataclass(frozen=True, kw_only=True)
class StageFlow:
    """A trace cut into stages."""

    trace: Trace
    num_stages: int
    call_stages: tuple[int, ...]
    """Stage of each call."""
    crossings: tuple[tuple[int, ...], ...]
    """For each boundary between stage k and k + 1, the ids of the tensors sent, ascending."""

    def sent(self, stage: int) -> tuple[int, ...]:
        """Ids that ``stage`` sends to the next."""
        return self.crossings[stage] if stage < self.num_stages - 1 else ()

    def received(self, stage: int) -> tuple[int, ...]:
        """Ids that ``stage`` receives from the one before."""
        return self.crossings[stage - 1] if stage > 0 else ()

    def metas(self, ids: tuple[int, ...]) -> tuple[TensorMeta, ...]:
        """Shape, dtype and device of these tensors."""
        return tuple(self.trace.tensors[i] for i in ids)


def cut(
    trace: Trace,
    stages_of_calls: Mapping[str, tuple[int, ...]],
    num_stages: int,
    *,
    with_tail: bool = False,
    heads: Collection[str] = (),
    is_run: bool = True,
) -> StageFlow:
    """Give every call its stage and find what crosses.

    A glue call belongs to the latest stage that it reads from. A tensor made in stage s and used in stage t > s
    crosses every boundary between them.

    Args:
        stages_of_calls: Block FQN -> stage of its first call, its second, ...; further calls stay on the last one.
        with_tail: Whether glue that no block depends on is a stage of its own, after the others.
        heads: FQNs of blocks that count as glue there.
        is_run: Whether stages will run so; else what could not cross is let pass.

    Raises:
        PlanError: a block reads a tensor of a later stage.
        TraceError: a tensor's values depend on something that does not cross: an in-place change of a tensor that it
            shares memory with, or a buffer that a block of another stage changes.
    """
    made: dict[int, int] = {}
    stale: dict[int, TracedCall] = {}  # tensor -> the in-place call on another stage that should have changed it
    used: dict[int, int] = {}
    call_stages = []
    elsewhere = trace.changed_buffers if num_stages > 1 else frozenset[str]()
    tail = _tail(trace, heads) if with_tail else frozenset()
    num_stages += with_tail
    for position, call in enumerate(trace.calls):
        earliest = num_stages - 1 if position in tail else max((made[i] for i in call.inputs), default=0)
        stage = stage_of_call(call, stages_of_calls) if call.is_block and position not in tail else earliest
        if stage < earliest:
            raise PlanError(
                f"Block {call.name} (called at {call.where}) is on pipeline stage {stage} but reads a tensor of stage"
                f" {earliest}. The blocks were called in another order when the stages were planned. Name other blocks"
                " with pipeline.partition='type:REGEX', or use fewer stages."
            )
        call_stages.append(stage)
        if is_run:
            _check_inputs(call, stale, elsewhere)
        if is_run and any(made[i] != stage for i in call.mutually_aliased):
            raise _entangled(call)
        for i in call.inputs:
            used[i] = max(used.get(i, 0), stage)
        for i in call.outputs:
            made[i] = stage
        received = {i for i in (*call.inputs, *call.aliased) if made[i] != stage}
        if len(received) > 1:  # else what shares memory was made here, from the one that was received
            stale |= {new: call for old, new in call.aliased.items() if old in received}
    for i in trace.returned:
        if i in stale and trace.stopped_by is None and is_run:
            raise _stale("What the step returns or logs", stale[i])
        used[i] = num_stages - 1
    crossings = tuple(tuple(sorted(i for i in made if made[i] <= k < used.get(i, -1))) for k in range(num_stages - 1))
    return StageFlow(trace=trace, num_stages=num_stages, call_stages=tuple(call_stages), crossings=crossings)


def cut_at_calls(trace: Trace) -> StageFlow:
    """As if each call of a block, with the glue after it, were a stage: any stage is some of these in a row."""
    num_calls = len(trace.block_calls)
    return cut(trace, stages_by_block((), trace, range(num_calls)), max(num_calls, 1), is_run=False)


def stages_by_block(blocks: Iterable[str], trace: Trace, stages: Sequence[int]) -> dict[str, tuple[int, ...]]:
    """Block FQN -> stages of its calls, given the stage of every call of a block; a block that the step never calls
    stays with the one defined before it.

    Args:
        blocks: FQNs in the order of their definition.
    """
    found: dict[str, tuple[int, ...]] = {}
    for call, stage in zip(trace.block_calls, stages, strict=True):
        found[call.name] = (*found.get(call.name, ()), stage)
    previous: tuple[int, ...] = (0,)
    for fqn in blocks:
        previous = found.setdefault(fqn, previous[-1:])
    return found


def stage_of_call(call: TracedCall, stages_of_calls: Mapping[str, tuple[int, ...]]) -> int:
    """The stage that runs a block's call."""
    stages = stages_of_calls[call.name]
    return stages[min(call.call_index, len(stages) - 1)]


def _tail(trace: Trace, heads: Collection[str]) -> frozenset[int]:
    """Positions of the calls that no block but heads depends on."""
    needed: set[int] = set()
    tail = set()
    for position, call in reversed(list(enumerate(trace.calls))):
        is_head = call.name in heads and call.side == SideOutputs() and not call.is_random
        if (call.is_block and not is_head) or not needed.isdisjoint(call.outputs):
            needed.update(call.inputs)
        else:
            tail.add(position)
    return frozenset(tail)


def _check_inputs(call: TracedCall, stale: Mapping[int, TracedCall], elsewhere: frozenset[str]) -> None:
    for i in call.inputs:
        if i in stale:
            raise _stale(f"{call.name} (called at {call.where})", stale[i])
    if changed := sorted(elsewhere.intersection(call.parameters)):
        raise TraceError(
            f"{call.name} (called at {call.where}) reads the buffer {changed[0]}, which its block's forward changes,"
            " but the block may live on another pipeline stage. Return the value from the block's forward."
        )


def _stale(reader: str, change: TracedCall) -> TraceError:
    return TraceError(
        f"{reader} reads a tensor that shares memory with one that {change.name} (called at {change.where}) changes in"
        " place, but the two are made on different pipeline stages, where they don't share memory. Make the change out"
        " of place (x = x + y instead of x += y), or clone() before it."
    )


def _entangled(call: TracedCall) -> TraceError:
    return TraceError(
        f"{call.name} (called at {call.where}) changes a tensor in place that shares memory with another one that it"
        " gets, but they are made on an earlier pipeline stage, from which each is sent by itself. Make the change out"
        " of place (x = x + y instead of x += y), or give the call a clone() of one of them."
    )
