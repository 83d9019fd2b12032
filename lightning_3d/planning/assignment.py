"""Which pipeline stage runs each call of a block."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn

from lightning_3d.config.settings import ThreeDConfig
from lightning_3d.context.dims import SequenceDims
from lightning_3d.distributed.mesh import MeshShape
from lightning_3d.errors import PlanError
from lightning_3d.model.blocks import num_parameters, tied_groups
from lightning_3d.planning.loads import Loads, find_loads
from lightning_3d.planning.observer import Observation
from lightning_3d.planning.partition import additive, partition
from lightning_3d.planning.plan import StagePlan, Unit
from lightning_3d.planning.slices import between_stages
from lightning_3d.planning.stage_flow import cut, cut_at_calls, stages_by_block
from lightning_3d.tensor.plan.block_plan import BlockTensorPlan
from lightning_3d.trace.ghost import TensorMeta
from lightning_3d.trace.trace import Trace


@dataclass(frozen=True, kw_only=True)
class Assignment:
    """The blocks' calls on stages."""

    stages_of_calls: Mapping[str, tuple[int, ...]]
    """Block FQN -> stage of its first call, its second, ...; for a block without calls the stage that holds it."""
    stages: tuple[StagePlan, ...]
    unit: Unit


Sent = Callable[[tuple[int, ...]], tuple[TensorMeta, ...]]
"""Ids of tensors that cross between stages -> what a rank sends of them."""


def assign_stages(
    observed: Observation,
    tensors: Mapping[str, BlockTensorPlan],
    config: ThreeDConfig,
    shape: MeshShape,
    device: torch.device,
) -> Assignment:
    """Cut the sequence of the blocks' calls into stages by ``config.pipeline.partition``.

    Args:
        observed: With a trace if there is more than one stage.
        tensors: Block FQN -> how its weights are sharded over tp.
        device: Where blocks will run.

    Raises:
        PlanError: there are more stages than calls, a named block can't begin a stage, or a block can't be measured.
    """
    module, blocks, trace = observed.module, observed.blocks, observed.trace
    num_stages = len(config.pipeline.stage_ranks(shape.pp))
    if num_stages > 1 and config.pipeline.mode == "inline":
        return _in_order(module, blocks, config.pipeline.partition, num_stages)
    if num_stages == 1:
        whole = StagePlan(load=sum(map(num_parameters, blocks.values())), num_sent=0, bytes_sent=0)
        return Assignment(stages_of_calls=dict.fromkeys(blocks, (0,)), stages=(whole,), unit="parameters")
    assert trace is not None, "a pipeline is planned along a trace"
    calls = [call.name for call in trace.block_calls]
    _check_number(calls, "calls of blocks", num_stages)
    loads = find_loads(observed, tensors, config, shape, device)
    sent = partial(between_stages, trace, dims=SequenceDims(config.context, blocks), size=shape.cp)
    if isinstance(config.pipeline.partition, tuple):
        stages = _begun_with(config.pipeline.partition, module, blocks, calls)
    else:
        stages = _cut_calls(trace, loads, num_stages, sent)
    of_calls = stages_by_block(blocks, trace, stages)
    plans = _stage_plans(trace, of_calls, stages, loads, sent)
    return Assignment(stages_of_calls=of_calls, stages=plans, unit=loads.unit)


def _check_number(calls: Sequence[str], what: str, num_stages: int) -> None:
    if len(calls) < num_stages:
        raise PlanError(
            f"{num_stages} pipeline stages: the model has only {len(calls)} {what} to share out"
            f" ({', '.join(calls) or 'none'}). Use at most {max(len(calls), 1)} stages, or name finer blocks with"
            " pipeline.partition='type:REGEX'."
        )


def _in_order(
    module: nn.Module, blocks: Mapping[str, nn.Module], method: str | tuple[str, ...], num_stages: int
) -> Assignment:
    """Cut the blocks as they are defined, where no trace tells how they are called; those that share a parameter stay
    together, as its gradient is complete on one rank. Where there are fewer than stages, the last stages have none.
    """
    groups = tied_groups(blocks)
    if not groups:
        _check_number([], "blocks", num_stages)
    sizes = [sum(num_parameters(blocks[fqn]) for fqn in group) for group in groups]
    if isinstance(method, tuple):
        stages = _begun_with(method, module, blocks, [group[0] for group in groups])
    else:
        loads = [1] * len(groups) if method == "uniform" else sizes
        stages = partition(additive(loads), [0] * (len(groups) - 1), min(num_stages, len(groups)))
    of_blocks = {fqn: (stage,) for stage, group in zip(stages, groups, strict=True) for fqn in group}
    plans = tuple(
        StagePlan(
            load=sum(size for size, at in zip(sizes, stages, strict=True) if at == stage), num_sent=0, bytes_sent=0
        )
        for stage in range(num_stages)
    )
    return Assignment(stages_of_calls={fqn: of_blocks[fqn] for fqn in blocks}, stages=plans, unit="parameters")


def _cut_calls(trace: Trace, loads: Loads, num_stages: int, sent: Sent) -> list[int]:
    """The stage of each call: by time alone where all ranks fit their memory then."""
    flow, peaks = cut_at_calls(trace), loads.peaks
    boundary_bytes = [sum(meta.num_bytes for meta in sent(ids)) for ids in flow.crossings]
    stages = partition(loads.of_stage, boundary_bytes, num_stages)
    if peaks is None or peaks.fit(stages):
        return stages

    def load(stage: int, start: int, stop: int) -> int:  # above all times where it does not fit
        return loads.of_stage(stage, start, stop) + peaks.excess(stage, start, stop) * 2**60

    return partition(load, boundary_bytes, num_stages)


def _bounds(stages: Sequence[int]) -> list[tuple[int, int, int]]:
    """Each stage, its first call, and the call after its last."""
    numbers = range(stages[-1] + 1)
    return [(stage, stages.index(stage), len(stages) - stages[::-1].index(stage)) for stage in numbers]


def _stage_plans(
    trace: Trace, of_calls: Mapping[str, tuple[int, ...]], stages: Sequence[int], loads: Loads, sent: Sent
) -> tuple[StagePlan, ...]:
    flow = cut(trace, of_calls, stages[-1] + 1)
    plans = []
    for stage, start, stop in _bounds(stages):
        metas = sent(flow.sent(stage))
        load, num_bytes = loads.of_stage(stage, start, stop), sum(meta.num_bytes for meta in metas)
        plans.append(StagePlan(load=load, num_sent=len(metas), bytes_sent=num_bytes))
    return tuple(plans)


def _begun_with(
    cut_points: Sequence[str], module: nn.Module, blocks: Mapping[str, nn.Module], calls: Sequence[str]
) -> list[int]:
    """Stage of each call, if each stage after the first begins with the first call of a named block."""
    names = {block: fqn for fqn, block in blocks.items()}
    starts = []
    for fqn in cut_points:
        name = names.get(module.get_submodule(fqn))  # a shared module may be named by any of its names
        if name is None or name not in calls:
            why = "is no block: it has no parameters, or lies inside a block" if name is None else "is never called"
            nearest = difflib.get_close_matches(fqn, calls, n=1, cutoff=0)[0]
            raise PlanError(f"pipeline.partition: {fqn!r} {why}. The nearest block that is called is {nearest!r}.")
        starts.append(calls.index(name))
        if starts[-1] == 0:
            raise PlanError(
                f"pipeline.partition: {fqn!r} is the first block that the step calls, so stage 0 would be empty. Name"
                f" the blocks with which the later stages begin; in the order of their calls: {_listed(calls)}."
            )
    if starts != sorted(starts):
        raise PlanError(
            f"pipeline.partition={list(cut_points)} is not in the order in which the step calls the blocks first:"
            f" {_listed(calls)}."
        )
    return [sum(start <= call for start in starts) for call in range(len(calls))]


def _listed(calls: Sequence[str]) -> str:
    return ", ".join(dict.fromkeys(calls))
