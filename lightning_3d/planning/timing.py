"""How long a schedule takes by the times of its stages, and what each rank sends in a step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from lightning_3d.planning.plan import Plan
from lightning_3d.planning.schedule_order import Computation, Kind, schedule_order

_SHARES: Mapping[Kind, float] = {"forward": 1 / 3, "backward": 2 / 3, "input": 1 / 3, "weight": 1 / 3}
"""The part of a stage's time for a microbatch that a computation takes: products of matrices come three times."""


def makespan(
    schedule: str, stage_ranks: Sequence[int], num_microbatches: int, stage_times: Sequence[float]
) -> tuple[float, float]:
    """The time of a training step, and the part of it in which ranks wait for others, on average.

    Args:
        schedule: A value of ``pipeline.schedule``.
        stage_ranks: Index on the pp axis of the rank of each stage.
        stage_times: Of a forward and a backward of one microbatch on each stage.
    """
    orders = schedule_order(schedule, stage_ranks, num_microbatches)
    ends: dict[Computation, float] = {}
    free, waiting = [0.0] * len(orders), [list(order) for order in orders]
    while any(waiting):
        for rank, order in enumerate(waiting):
            while order and ends.keys() >= (needed := _needed(order[0], len(stage_ranks))):
                now = order.pop(0)
                end = max([free[rank], *map(ends.__getitem__, needed)]) + _SHARES[now.kind] * stage_times[now.stage]
                free[rank] = ends[now] = end
                if now.kind == "backward":  # what waits for gradients of inputs alone may have it, too
                    ends[now._replace(kind="input")] = end
                elif now.kind == "input":
                    ends[now._replace(kind="backward")] = end
    total, busy = max(free), num_microbatches * sum(stage_times) / len(orders)
    return total, 1 - busy / total if total else 0.0


def _needed(computation: Computation, num_stages: int) -> set[Computation]:
    kind, stage, microbatch = computation
    if kind == "forward":
        return {Computation("forward", stage - 1, microbatch)} if stage else set()
    if kind == "weight":
        return {Computation("input", stage, microbatch)}
    after = {Computation("input", stage + 1, microbatch)} if stage + 1 < num_stages else set()
    return {Computation("forward", stage, microbatch), *after}


def sent_bytes(plan: Plan, weights: Sequence[int], *, num_sharing: int, gathers_again: bool) -> dict[str, int]:
    """Axis of the mesh -> the most bytes that a rank sends over it in a training step, by rings.

    Args:
        weights: Bytes of the trained weights of each rank of the pp axis, before ZeRO.
        num_sharing: Ranks that share them.
        gathers_again: Whether ZeRO-3 gathers parameters for the backward again.
    """
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
    if plan.shape.dp > 1:
        num_collectives = 2 + (plan.zero_stage == 3 and gathers_again)  # each as long as half an all-reduce
        found["dp"] = int(num_collectives * max(weights) * (num_sharing - 1) / max(num_sharing, 1))
        if num_sharing < plan.shape.dp:  # an all-reduce of shards between the groups that share
            groups = plan.shape.dp // max(num_sharing, 1)
            found["dp"] += int(2 * max(weights) / max(num_sharing, 1) * (groups - 1) / groups)
    return found
