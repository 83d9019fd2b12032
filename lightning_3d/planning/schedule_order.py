"""The order in which the ranks of a pipeline compute, by schedule, before anything runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

from lightning_3d.torch_internals.pipelining import ComputationType, planned_actions

Kind = Literal["forward", "backward", "input", "weight"]
"""Kind of a computation: forward, whole backward, or its two halves: gradients of inputs, and of weights."""

KINDS: Mapping[ComputationType, Kind] = {
    ComputationType.FORWARD: "forward",
    ComputationType.FULL_BACKWARD: "backward",
    ComputationType.BACKWARD_INPUT: "input",
    ComputationType.BACKWARD_WEIGHT: "weight",
}


class Computation(NamedTuple):
    """A computation of one microbatch on one stage."""

    kind: Kind
    stage: int
    microbatch: int


def suits(schedule: str, num_microbatches: int, num_ranks: int) -> bool:
    """Whether torch's schedule takes this number of microbatches; the last batch of an epoch may have fewer."""
    if schedule == "1f1b":
        return num_microbatches >= num_ranks
    return schedule in ("gpipe", "zbv") or num_microbatches % max(1, num_microbatches // num_ranks) == 0


def schedule_order(schedule: str, stage_ranks: Sequence[int], num_microbatches: int) -> list[list[Computation]]:
    """The computations of each rank of the pp axis in a training step, in order.

    Args:
        schedule: A value of ``pipeline.schedule``.
        stage_ranks: For every stage the index of its rank.
    """
    num_ranks = max(stage_ranks) + 1
    if schedule == "gpipe" or len(stage_ranks) == 1 or not suits(schedule, num_microbatches, num_ranks):
        return [_forwards_first(_own(stage_ranks, rank), num_microbatches) for rank in range(num_ranks)]
    if schedule == "1f1b":
        return [order_1f1b(num_ranks - 1 - rank, rank, num_microbatches) for rank in range(num_ranks)]
    return [
        [
            Computation(kind=KINDS[kind], stage=stage, microbatch=index)
            for kind, stage, index in actions
            if kind in KINDS
        ]
        for actions in planned_actions(schedule, stage_ranks, num_microbatches)
    ]


def order_1f1b(num_ahead: int, stage: int, num_microbatches: int) -> list[Computation]:
    """Some forwards ahead, then forward and backward in turn, then the backwards that are left."""
    forward = [Computation(kind="forward", stage=stage, microbatch=i) for i in range(num_microbatches)]
    backward = [Computation(kind="backward", stage=stage, microbatch=i) for i in range(num_microbatches)]
    pairs = zip(forward[num_ahead:], backward, strict=False)
    in_turn = [computation for pair in pairs for computation in pair]
    return [*forward[:num_ahead], *in_turn, *backward[num_microbatches - num_ahead :]]


def _own(stage_ranks: Sequence[int], rank: int) -> list[int]:
    return [stage for stage, holder in enumerate(stage_ranks) if holder == rank]


def _forwards_first(stages: Sequence[int], num_microbatches: int) -> list[Computation]:
    pairs = [(stage, index) for stage in stages for index in range(num_microbatches)]
    forwards = [Computation(kind="forward", stage=stage, microbatch=index) for stage, index in pairs]
    backwards = [Computation(kind="backward", stage=stage, microbatch=index) for stage, index in pairs]
    if len(stages) == 1:  # torch's GPipe takes them in the order of the forwards
        return [*forwards, *backwards]
    return [*forwards, *reversed(backwards)]
