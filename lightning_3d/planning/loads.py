"""The load of a pipeline stage by each partition method: what ``partition`` balances.

Times and bytes are those of `block_costs`: a forward and a backward of each kind of block on fake tensors, so that they
are the same on every machine.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal

import torch
from torch import Tensor, nn

from lightning_3d.config.settings import ThreeDConfig
from lightning_3d.distributed.device_memory import total_memory
from lightning_3d.distributed.mesh import MeshShape
from lightning_3d.memory.block_cost import FLOPS_PER_BYTE, BlockCost, block_costs
from lightning_3d.planning.partition import StageLoad, additive
from lightning_3d.trace.trace import Trace

Unit = Literal["parameters", "calls", "operations"]

_STATE_BYTES = 8  # two fp32 numbers per parameter, as AdamW keeps


@dataclass(frozen=True, kw_only=True)
class Loads:
    """How heavy a stage would be with some of the calls of blocks."""

    of_stage: StageLoad
    """The load that the assignment makes small: above all times where a stage exceeds its memory."""

    told: StageLoad
    """In the unit."""

    unit: Unit


def find_loads(
    blocks: Mapping[str, nn.Module], trace: Trace, config: ThreeDConfig, shape: MeshShape, device: torch.device
) -> Loads:
    """Loads by the method ``config.pipeline.partition``; by parameters if it names blocks, or a block needs data.

    A block counts at each of its calls.
    """
    calls = [call.name for call in trace.block_calls]
    if config.pipeline.partition == "uniform":
        return _plain(additive([1] * len(calls)), "calls")
    if config.pipeline.partition == "auto":
        measured = block_costs(blocks, trace, device)
        costs = {fqn: cost for fqn, cost in measured.items() if cost is not None}
        if len(costs) == len(measured):
            times = within = _times(trace, costs)
            with suppress(RuntimeError):  # there are devices whose memory torch does not count
                total = total_memory(device, shape.world_size)
                memory = _memory([(blocks[fqn], costs[fqn].divided(shape.tp)) for fqn in calls], config, shape)
                within = _within(config.activations.budget_bytes(total, total), times, memory)
            return Loads(of_stage=within, told=times, unit="operations")
    return _plain(additive([num_parameters(blocks[fqn]) for fqn in calls]), "parameters")


def _plain(load: StageLoad, unit: Unit) -> Loads:
    return Loads(of_stage=load, told=load, unit=unit)


def num_parameters(block: nn.Module) -> int:
    """Elements of all parameters of a block."""
    return sum(parameter.numel() for parameter in block.parameters())


def _times(trace: Trace, costs: Mapping[str, BlockCost]) -> StageLoad:
    """Operations of each call of a block, and of the glue that follows it."""
    times: list[int] = []
    for call in trace.calls:
        if call.is_block:
            times.append(costs[call.name].time)
        elif times:  # its forward writes its results, its backward as much
            times[-1] += 2 * FLOPS_PER_BYTE * sum(trace.tensors[i].num_bytes for i in call.outputs)
    return additive(times)


def _within(budget: int, time: StageLoad, memory: StageLoad) -> StageLoad:
    """The time of a stage, or above all times if its memory exceeds a budget."""

    def load(stage: int, start: int, stop: int) -> int:
        excess = memory(stage, start, stop) - budget
        return time(stage, start, stop) + max(excess, 0) * 2**60

    return load


def _memory(calls: Sequence[tuple[nn.Module, BlockCost]], config: ThreeDConfig, shape: MeshShape) -> StageLoad:
    """Bytes of the weights' state on one rank, and of the activations that a stage holds at once.

    Args:
        calls: Block and cost of each call.
    """
    num_stages = len(config.pipeline.stage_ranks(shape.pp))
    state: list[int] = []
    repeated: list[tuple[int, int, int]] = []  # (call, earlier call with the same parameter, its bytes)
    latest: dict[Tensor, int] = {}
    for call, (block, _) in enumerate(calls):
        state.append(0)
        for parameter in block.parameters():
            num_bytes = _state_bytes(parameter, zero_stage=config.zero.stage, shape=shape)
            state[-1] += num_bytes
            if parameter in latest:
                repeated.append((call, latest[parameter], num_bytes))
            latest[parameter] = call
    mode = "full" if config.activations.recompute == "auto" else config.activations.recompute
    states = [0, *accumulate(state)]
    activations = [0, *accumulate(cost.kept(mode) + cost.returned for _, cost in calls)]

    def load(stage: int, start: int, stop: int) -> int:
        held_already = sum(size for call, earlier, size in repeated if start <= earlier and call < stop)
        in_flight = _num_in_flight(config, stage, num_stages)
        return states[stop] - states[start] - held_already + in_flight * (activations[stop] - activations[start])

    return load


def _state_bytes(parameter: Tensor, *, zero_stage: int, shape: MeshShape) -> int:
    """Bytes of a parameter, its gradient and its optimizer state on one rank.

    How tensor parallel shards a block is planned once its stage is known: here it shards all but vectors.
    """
    sharers = shape.tp if parameter.dim() > 1 else 1
    weight = parameter.nbytes // sharers // (shape.dp if zero_stage >= 3 else 1)
    if not parameter.requires_grad:
        return weight
    gradient = parameter.nbytes // sharers // (shape.dp if zero_stage >= 2 else 1)
    states = parameter.numel() * _STATE_BYTES // sharers // (shape.dp if zero_stage >= 1 else 1)
    return weight + gradient + states


def _num_in_flight(config: ThreeDConfig, stage: int, num_stages: int) -> int:
    """Microbatches whose activations a stage holds at once: all in GPipe; in the others about as many as in 1F1B."""
    if config.pipeline.schedule == "gpipe":
        return config.num_microbatches
    return min(config.num_microbatches, num_stages - stage)
