"""The time of a training step of a plan, predicted from what its ranks compute and send.

stage       products, bytes written and calls of its operators; collectives of tensor parallel; what it sends
pipeline    the schedule's makespan of its stages
gradients   reduced over the replicas, beside the backward where devices do that, but for the last bucket
optimizer   reads and writes weights, gradients and states
"""

from __future__ import annotations

from dataclasses import dataclass

from lightning_3d.distributed.machine import Machine, Work
from lightning_3d.planning.held import StateMemory
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
    def of(cls, plan: Plan, step: StepMemory, state: StateMemory, machine: Machine) -> StepSeconds:
        """Predict it."""
        times = [_stage_seconds(plan, step, machine, stage) for stage in range(plan.num_stages)]
        computing, most = times[0], max(state.weights)
        if plan.shape.pp > 1:
            computing, _ = makespan(plan.schedule, plan.stage_ranks, plan.num_microbatches, times)
        reducing = _reducing(plan, state, machine)
        if machine.overlaps:  # with the backward, but for the last bucket
            reducing = max(reducing - computing * 2 / 3, reducing / _num_buckets(most))
        calls = 0 if machine.overlaps else max(state.num_trained) * _CALLS_OF_OPTIMIZER
        written = (2 + state.num_states) * most / state.num_sharing  # weights, states and what lies between
        stepping = machine.seconds(Work(written=written, calls=calls))
        return cls(computing=computing, reducing=reducing, stepping=stepping)


def _stage_seconds(plan: Plan, step: StepMemory, machine: Machine, stage: int) -> float:
    """The time of one microbatch on a rank."""
    shape, blocks = plan.shape, plan.blocks_of(stage)
    calls, modes = step.stages_on(plan, plan.stage_ranks[stage])[stage], {b.fqn: b.recompute for b in blocks}
    work, seconds = step.work(calls, modes), 0.0
    if shape.pp > 1:
        work += Work(calls=_CALLS_OF_STAGE)
        sent, send = plan.stages[stage], machine.network(shape.world_size)["send"]
        seconds += 2 * send.seconds(sent.bytes_sent, sent.num_sent)
    links, between_slices = machine.network(shape.tp), machine.network(shape.cp * shape.tp)["all-gather"]
    for block in blocks:
        if sent_bytes := step.sent_for_slices(block.fqn):
            seconds += between_slices.seconds(sent_bytes, 8)
        if block.tensor is None or not block.tensor.is_sharded:
            continue
        work += Work(calls=(_CALLS_OF_SHARDED - 1) * step.costs[block.fqn].num_calls if block.fqn in step.costs else 0)
        seconds += sum(links[each.kind].seconds(each.num_bytes) for each in block.tensor.collectives)
    return machine.seconds(work) + seconds


def _reducing(plan: Plan, state: StateMemory, machine: Machine) -> float:
    """Seconds in which replicas reduce gradients, and gather what they share."""
    links = machine.network(plan.shape.world_size // plan.shape.pp)
    number = len(plan.blocks) if plan.zero_stage == 3 else _num_buckets(max(state.weights))
    return sum(links[kind].seconds(num_bytes, number) for kind, num_bytes in sent_by_replicas(plan, state))


def _num_buckets(weights: int) -> int:
    return max(1, round(weights / bucket_bytes_of(weights)))
