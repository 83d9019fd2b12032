"""The load of a pipeline stage by each partition method: what ``partition`` balances."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

import torch

from lightning_3d.activations.chosen_blocks import chosen_blocks
from lightning_3d.config.activations import Mode
from lightning_3d.config.settings import ThreeDConfig
from lightning_3d.distributed.device_memory import total_memory
from lightning_3d.distributed.mesh import MeshShape
from lightning_3d.memory.rank_memory import StaticMemory
from lightning_3d.model.blocks import num_parameters
from lightning_3d.planning.held import StateMemory, StateShapes
from lightning_3d.planning.observer import Observation
from lightning_3d.planning.partition import StageLoad, additive
from lightning_3d.planning.plan import Unit
from lightning_3d.planning.stage_flow import stages_by_block
from lightning_3d.planning.state_places import place_state
from lightning_3d.planning.step_memory import Calls, StepMemory
from lightning_3d.tensor.plan.block_plan import BlockTensorPlan
from lightning_3d.trace.trace import Trace


@dataclass(frozen=True, kw_only=True)
class Loads:
    """How heavy a stage would be with some of the calls of blocks."""

    of_stage: StageLoad
    unit: Unit
    peaks: Peaks | None = None
    """The peaks of ranks with such stages; None where they are not known."""


class Peaks:
    """The predicted peaks of ranks with stages of some calls, in bytes, as the plan reports them.

    Where a budget decides what is recomputed, that is everything.

    Args:
        budget: Bytes that a rank may take.
    """

    def __init__(
        self,
        step: StepMemory,
        observed: Observation,
        trace: Trace,
        tensors: Mapping[str, BlockTensorPlan],
        config: ThreeDConfig,
        shape: MeshShape,
        device: torch.device,
        budget: int,
    ) -> None:
        module, blocks = observed.module, observed.blocks
        calls = range(len(trace.block_calls))
        of_blocks = stages_by_block(blocks, trace, calls)
        places = place_state(module, blocks, of_blocks, trace, calls)
        self._state = StateMemory(
            StateShapes(module), places, of_blocks, tensors, config, shape, observed.step.num_states
        )
        mode: Mode = "full" if config.activations.recompute == "auto" else config.activations.recompute
        called = {fqn: blocks[fqn] for fqn in trace.block_inputs}
        self._modes = dict.fromkeys(chosen_blocks(called, config.activations), mode)
        self._step, self._batch, self._device, self._budget = step, observed.step.microbatch, device, budget
        self._ranks, self._num_local_stages = config.pipeline.stage_ranks(shape.pp), config.pipeline.num_local_stages
        self._held: dict[Calls, StaticMemory] = {}
        self._excesses: dict[tuple[int, int, int], int] = {}

    def fit(self, stages: Sequence[int]) -> bool:
        """Whether all ranks fit, given the stage of each call."""
        calls = {stage: tuple(i for i, of_call in enumerate(stages) if of_call == stage) for stage in {*stages}}
        on_ranks = (
            (rank, {stage: own for stage, own in calls.items() if self._ranks[stage] == rank})
            for rank in {*self._ranks}
        )
        return all(self._peak(rank, own) <= self._budget for rank, own in on_ranks)

    def excess(self, stage: int, start: int, stop: int) -> int:
        """Bytes by which a rank with a stage of these calls, or of the last of them, exceeds that stage's share."""
        key = stage, start, stop
        if key not in self._excesses:
            own = self._peak(self._ranks[stage], {stage: tuple(range(start, stop))})
            shorter = self.excess(stage, start + 1, stop) if stage and start + 1 < stop else 0
            self._excesses[key] = max(own - self._budget // self._num_local_stages, shorter, 0)
        return self._excesses[key]

    def _peak(self, rank: int, stages: Mapping[int, Calls]) -> int:
        calls = tuple(call for own in stages.values() for call in own)
        if calls not in self._held:
            self._held[calls] = self._state.at({*calls}, self._batch, self._device)
        return self._step.peak(rank, stages, self._modes, self._held[calls])


def find_loads(
    observed: Observation,
    tensors: Mapping[str, BlockTensorPlan],
    config: ThreeDConfig,
    shape: MeshShape,
    device: torch.device,
) -> Loads:
    """Loads by the method ``config.pipeline.partition``; by parameters if it names blocks, or a block needs data.

    A block counts at each of its calls.
    """
    trace = observed.trace
    assert trace is not None, "a pipeline is planned along a trace"
    calls = [call.name for call in trace.block_calls]
    if config.pipeline.partition == "uniform":
        return Loads(of_stage=additive([1] * len(calls)), unit="calls")
    if config.pipeline.partition == "auto" and trace.storages is not None:
        step = StepMemory(observed, tensors, config, shape, device)
        if step.is_measured:
            peaks: Peaks | None = None
            with suppress(RuntimeError):  # there are devices whose memory torch does not count
                total = total_memory(device, shape.world_size)
                budget = config.activations.budget_bytes(total, total)
                peaks = Peaks(step, observed, trace, tensors, config, shape, device, budget)
            return Loads(of_stage=additive(step.operations), unit="operations", peaks=peaks)
    return Loads(of_stage=additive([num_parameters(observed.blocks[fqn]) for fqn in calls]), unit="parameters")
