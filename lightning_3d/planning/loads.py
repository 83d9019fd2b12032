"""The load of a pipeline stage by each partition method: what ``partition`` balances."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal

import torch
from torch import Tensor, nn

from lightning_3d.config.settings import ThreeDConfig
from lightning_3d.distributed.mesh import MeshShape
from lightning_3d.errors import PlanError
from lightning_3d.model.blocks import kind_of
from lightning_3d.planning.measure import Inputs, measure_activations, measure_time
from lightning_3d.planning.partition import StageLoad, additive
from lightning_3d.trace.trace import Trace

Unit = Literal["parameters", "calls", "nanoseconds", "bytes"]

_STATE_BYTES = 8  # two fp32 numbers per parameter, as AdamW keeps


@dataclass(frozen=True, kw_only=True)
class Loads:
    """How heavy a stage would be with some of the calls of blocks."""

    of_stage: StageLoad
    unit: Unit


def find_loads(
    blocks: Mapping[str, nn.Module], trace: Trace, config: ThreeDConfig, shape: MeshShape, device: torch.device
) -> Loads:
    """Loads by the method ``config.pipeline.partition``; by parameters if it names blocks.

    A block counts at each of its calls, but for its weights in ``"memory"``, which a stage holds once. Glue counts
    nothing. ``"time"`` and ``"memory"`` run one block of each kind on the device.

    Raises:
        PlanError: a block fails on random inputs of the example's shapes.
    """
    calls = [call.name for call in trace.block_calls]
    method = config.pipeline.partition
    if method == "uniform":
        return Loads(of_stage=additive([1] * len(calls)), unit="calls")
    if method == "time":
        times = _of_kinds(blocks, trace, lambda block, inputs: measure_time(block, inputs, device), method)
        return Loads(of_stage=additive([times[fqn] for fqn in calls]), unit="nanoseconds")
    if method == "memory":
        kept = _of_kinds(blocks, trace, lambda block, inputs: measure_activations(block, inputs, device), method)
        return Loads(of_stage=_memory([(blocks[fqn], kept[fqn]) for fqn in calls], config, shape), unit="bytes")
    return Loads(of_stage=additive([num_parameters(blocks[fqn]) for fqn in calls]), unit="parameters")


def num_parameters(block: nn.Module) -> int:
    """Elements of all parameters of a block."""
    return sum(parameter.numel() for parameter in block.parameters())


def _of_kinds(
    blocks: Mapping[str, nn.Module], trace: Trace, measure: Callable[[nn.Module, Inputs], int], method: str
) -> dict[str, int]:
    """Block FQN -> what ``measure`` says; blocks that are alike and get like inputs are measured once."""
    found: dict[Hashable, int] = {}
    measured = {}
    for fqn, inputs in trace.block_inputs.items():
        kind = (kind_of(blocks[fqn]), repr(inputs))
        if kind not in found:
            try:
                found[kind] = measure(blocks[fqn], inputs)
            except Exception as error:
                raise PlanError(
                    f"pipeline.partition='{method}' runs every kind of block on random inputs (integers are 0) of the"
                    f" example's shapes, but {fqn} failed on them ({type(error).__name__}: {error}). Use"
                    " pipeline.partition='parameters', or name the blocks with which stages begin."
                ) from error
        measured[fqn] = found[kind]
    return measured


def _memory(calls: Sequence[tuple[nn.Module, int]], config: ThreeDConfig, shape: MeshShape) -> StageLoad:
    """Bytes of the weights' state on one rank, and of the activations that a stage holds at once.

    Args:
        calls: Block and bytes of activations of each call.
    """
    num_stages = len(config.pipeline.stage_ranks(shape.pp))
    state: list[int] = []
    repeated: list[tuple[int, int, int]] = []  # (call, earlier call with the same parameter, its bytes)
    latest: dict[Tensor, int] = {}
    for call, (block, _) in enumerate(calls):
        state.append(0)
        for parameter in block.parameters():
            num_bytes = _state_bytes(parameter, zero_stage=config.zero.stage, dp=shape.dp)
            state[-1] += num_bytes
            if parameter in latest:
                repeated.append((call, latest[parameter], num_bytes))
            latest[parameter] = call
    states, activations = [0, *accumulate(state)], [0, *accumulate(kept for _, kept in calls)]

    def load(stage: int, start: int, stop: int) -> int:
        held_already = sum(size for call, earlier, size in repeated if start <= earlier and call < stop)
        in_flight = _num_in_flight(config, stage, num_stages)
        return states[stop] - states[start] - held_already + in_flight * (activations[stop] - activations[start])

    return load


def _state_bytes(parameter: Tensor, *, zero_stage: int, dp: int) -> int:
    """Bytes of a parameter, its gradient and its optimizer state on one rank, before tensor parallel."""
    weight = parameter.nbytes // (dp if zero_stage >= 3 else 1)
    if not parameter.requires_grad:
        return weight
    gradient = parameter.nbytes // (dp if zero_stage >= 2 else 1)
    return weight + gradient + parameter.numel() * _STATE_BYTES // (dp if zero_stage >= 1 else 1)


def _num_in_flight(config: ThreeDConfig, stage: int, num_stages: int) -> int:
    """Microbatches whose activations a stage holds at once: all in GPipe; in the others about as many as in 1F1B."""
    if config.pipeline.schedule == "gpipe":
        return config.num_microbatches
    return min(config.num_microbatches, num_stages - stage)
