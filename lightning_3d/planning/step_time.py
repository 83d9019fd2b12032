"""The time of a training step of a plan, predicted from what its ranks compute and send.

stage       products, bytes written and calls of its operators; collectives of tensor parallel; what it sends
pipeline    the schedule's makespan of its stages
gradients   reduced over the replicas, beside the backward where devices do that, but for the last bucket
optimizer   reads and writes weights, gradients and states
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lightning_3d.distributed.machine import Machine, Work
from lightning_3d.planning.plan import Plan
from lightning_3d.planning.step_memory import StepMemory
from lightning_3d.planning.timing import makespan, sent_by_replicas
from lightning_3d.zero.buckets import bucket_bytes_of

_CALLS_OF_STAGE = 100  # a microbatch on a stage takes the host as long as so many operators
_CALLS_OF_SHARDED = 4  # an operator on tensor-parallel shards, as so many
_CALLS_OF_OPTIMIZER = 12  # operators for each parameter


@dataclass(frozen=True, kw_only=True)
class StepSeconds:
    """Seconds of a step."""

    computing: float
    """Forwards and backwards, with what they wait for."""
    reducing: float
    """Gradients and weights on their way between replicas, while nothing is computed."""
    stepping: float
    """The optimizer."""

    @property
    def total(self) -> float:
        """All of it."""
        return self.computing + self.reducing + self.stepping

    @classmethod
    def of(
        cls,
        plan: Plan,
        step: StepMemory,
        machine: Machine,
        *,
        weights: Sequence[int],
        num_parameters: Sequence[int],
        num_sharing: int,
        num_states: int,
        gathers_again: bool,
    ) -> StepSeconds:
        """Predict it.

        Args:
            weights: Bytes of the trained weights of each rank of the pp axis, before ZeRO.
            num_parameters: How many parameters these are.
            num_sharing: Ranks that share them.
            num_states: Numbers that the optimizer keeps for each parameter.
            gathers_again: Whether ZeRO-3 gathers parameters for the backward again.
        """
        times = [_stage_seconds(plan, step, machine, stage) for stage in range(plan.num_stages)]
        computing, most = times[0], max(weights)
        if plan.shape.pp > 1:
            computing, _ = makespan(plan.schedule, plan.stage_ranks, plan.num_microbatches, times)
        reducing = _reducing(plan, machine, most, num_sharing, gathers_again=gathers_again)
        if machine.overlaps:  # with the backward, but for the last bucket
            reducing = max(reducing - computing * 2 / 3, reducing / _num_buckets(most))
        calls = 0 if machine.overlaps else max(num_parameters) * _CALLS_OF_OPTIMIZER
        written = (2 + num_states) * most / num_sharing  # weights, states and what lies between
        stepping = machine.seconds(Work(written=written, calls=calls))
        return cls(computing=computing, reducing=reducing, stepping=stepping)


def _stage_seconds(plan: Plan, step: StepMemory, machine: Machine, stage: int) -> float:
    """The time of one microbatch on a rank."""
    shape, blocks = plan.shape, plan.blocks_of(stage)
    work, seconds = step.work(stage, {block.fqn: block.recompute for block in blocks}), 0.0
    if shape.pp > 1:
        work += Work(calls=_CALLS_OF_STAGE)
        sent, send = plan.stages[stage], machine.network(shape.world_size)["send"]
        seconds += 2 * send.seconds(sent.bytes_sent, sent.num_sent)
    links = machine.network(shape.tp)
    for block in blocks:
        if block.tensor is None or not block.tensor.is_sharded:
            continue
        work += Work(calls=(_CALLS_OF_SHARDED - 1) * step.costs[block.fqn].num_calls if block.fqn in step.costs else 0)
        seconds += sum(links[each.kind].seconds(each.num_bytes) for each in block.tensor.collectives)
    return machine.seconds(work) + seconds


def _reducing(plan: Plan, machine: Machine, weights: int, num_sharing: int, *, gathers_again: bool) -> float:
    """Seconds in which replicas reduce gradients, and gather what they share."""
    links = machine.network(plan.shape.tp * plan.shape.dp)
    number = len(plan.blocks) if plan.zero_stage == 3 else _num_buckets(weights)
    sent = sent_by_replicas(plan, weights, num_sharing=num_sharing, gathers_again=gathers_again)
    return sum(links[kind].seconds(num_bytes, number) for kind, num_bytes in sent)


def _num_buckets(weights: int) -> int:
    return max(1, round(weights / bucket_bytes_of(weights)))
