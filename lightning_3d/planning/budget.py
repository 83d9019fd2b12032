"""A budget of memory: the cheapest blocks to recompute so that every rank stays within it, or an error before training.

Decided once it is known what every rank holds.
"""

from __future__ import annotations

import warnings
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from torch import nn

from lightning_3d.activations.chosen_blocks import chosen_blocks
from lightning_3d.config.activations import Mode
from lightning_3d.config.settings import ThreeDConfig
from lightning_3d.distributed.agreement import on_one_rank
from lightning_3d.distributed.device_memory import available_memory, total_memory
from lightning_3d.distributed.mesh import Mesh
from lightning_3d.errors import MemoryPlanError, PlanError
from lightning_3d.memory.rank_memory import RankMemory, StaticMemory, size_text
from lightning_3d.planning.held import PlannedStaticMemory, bytes_of
from lightning_3d.planning.plan import Plan
from lightning_3d.planning.planner import Observation
from lightning_3d.planning.step_memory import StepMemory
from lightning_3d.torch_internals.lightning_helpers import callbacks_of

_NUM_BUDGETS = 10  # that are tried for `trade_offs`


def accumulates(trainer: Trainer) -> bool:
    """Whether the gradients of several batches add up, in some epoch at least."""
    scheduled = (each for each in callbacks_of(trainer) if isinstance(each, GradientAccumulationScheduler))
    most = max((max(each.scheduling.values()) for each in scheduled), default=1)
    return max(most, trainer.accumulate_grad_batches) > 1


@dataclass(kw_only=True)
class Budget:
    """A training step that has to fit."""

    step: StepMemory
    batch: Any
    """A microbatch."""

    _first: int | None = None
    _has_warned: bool = False

    @classmethod
    def of(
        cls,
        plan: Plan,
        observed: Observation,
        config: ThreeDConfig,
        device: torch.device,
        *,
        accumulates: bool,
        num_sharing: int,
    ) -> Budget:
        """The budget of an observed step; the arguments are those of `StepMemory`."""
        assert observed.trace is not None
        with observed.step.modes():
            step = StepMemory(
                plan,
                plan.blocks_in(observed.module),
                observed.trace,
                device,
                config,
                accumulates=accumulates,
                num_sharing=num_sharing,
            )
        return cls(step=step, batch=observed.step.microbatch)

    def look_at(self, batch: Any) -> None:
        """Before a training step: warn once of a batch of this rank that is larger than the first."""
        num_bytes = bytes_of(batch)
        self._first = num_bytes if self._first is None else self._first
        if num_bytes > self._first and not self._has_warned:
            self._has_warned = True
            warnings.warn(
                f"A batch of {num_bytes} bytes comes after a first one of {self._first} bytes, with which"
                " activations.budget was planned: its step may take more memory than the budget. Let the first batch be"
                " the largest.",
                stacklevel=2,
            )

    def plan(
        self,
        plan: Plan,
        module: nn.Module,
        held: PlannedStaticMemory,
        config: ThreeDConfig,
        mesh: Mesh,
        device: torch.device,
    ) -> Plan:
        """The plan with what is recomputed, and the memory of all ranks; every rank calls it.

        Raises:
            PlanError: a rank does not fit.
        """
        of_ranks, num_ranks = held.of_ranks(self.batch, device), mesh.shape.world_size
        available = available_memory(device, num_ranks, of_ranks[mesh.pp_rank].weights)
        own = config.activations.budget_bytes(total_memory(device, num_ranks), available)
        everyone = [(mesh.pp_rank, own)] * num_ranks
        dist.all_gather_object(everyone, (mesh.pp_rank, own))
        budgets = [min(budget for index, budget in everyone if index == rank) for rank in range(mesh.shape.pp)]
        return on_one_rank(lambda: self.decide(plan, plan.blocks_in(module), config, of_ranks, budgets))

    def decide(
        self,
        plan: Plan,
        blocks: Mapping[str, nn.Module],
        config: ThreeDConfig,
        held: Sequence[StaticMemory],
        budgets: Sequence[int],
    ) -> Plan:
        """The same by what the ranks of the pp axis hold anyway and may take, in bytes; without communication."""
        modes = {block.fqn: block.recompute for block in plan.blocks}
        if config.activations.recompute == "auto":
            # Compiled blocks on shards keep inputs in full, too.
            is_counted = not config.compile.enabled or config.tensor_parallel_size == 1
            ways: tuple[Mode, ...] = ("selective", "full") if is_counted else ("full",)
            modes = choose_recomputation(self.step, chosen_blocks(blocks, config.activations), ways, held, budgets)
            plan = plan.with_recomputation(modes)
        rows = []
        for rank, (own, budget) in enumerate(zip(held, budgets, strict=True)):
            peak = self.step.peak(rank, modes, own)
            if peak > budget:
                raise _too_much(self.step, rank, peak, own, budget, modes, is_least=False)
            rows.append(RankMemory(held=own, peak=peak, budget=budget))
        return replace(plan, memory=tuple(rows))


def choose_recomputation(
    step: StepMemory,
    candidates: Collection[str],
    ways: Sequence[Mode],
    held: Sequence[StaticMemory],
    budgets: Sequence[int],
) -> dict[str, Mode]:
    """Block FQN -> how it is recomputed, of those that are.

    Greedy: until a rank fits, it recomputes what saves the most bytes for the time that it costs; of equal blocks the
    first, whose activations wait the longest.

    Args:
        candidates: FQNs of the blocks that may be recomputed.
        ways: How, the one that saves less first.
        held: What the ranks hold anyway, by index on the pp axis.
        budgets: Bytes that each of them may take.

    Raises:
        PlanError: a rank does not fit, whatever is recomputed.
    """
    chosen: dict[str, Mode] = {}
    for rank, (own, budget) in enumerate(zip(held, budgets, strict=True)):
        fqns = [block.fqn for block in step.plan.blocks_on(rank) if block.fqn in candidates and block.fqn in step.costs]
        least, least_modes = step.peak(rank, chosen, own), dict(chosen)
        while (peak := step.peak(rank, chosen, own)) > budget:
            if peak < least:
                least, least_modes = peak, dict(chosen)
            changes = [(_gain(step, fqn, chosen.get(fqn, "none"), way), fqn, way) for fqn in fqns for way in ways]
            gain, fqn, way = max(changes, key=lambda change: change[0], default=(0.0, "", "none"))
            if gain <= 0:
                raise _too_much(step, rank, least, own, budget, least_modes, is_least=True)
            chosen[fqn] = way
    return chosen


def trade_offs(step: StepMemory, held: Sequence[StaticMemory]) -> list[tuple[int, float]]:
    """The largest peak of a rank, in bytes, and the share of operations that are computed again for it, by budgets from
    the peak without recomputation to the least that any gives.

    Args:
        held: What the ranks hold anyway, by index on the pp axis.
    """

    def peak(modes: Mapping[str, Mode]) -> int:
        return max(step.peak(rank, modes, own) for rank, own in enumerate(held))

    most, least = peak({}), peak(dict.fromkeys(step.costs, "full"))
    points = []
    for level in range(_NUM_BUDGETS + 1):
        budget = most - (most - least) * level // _NUM_BUDGETS
        try:
            modes = choose_recomputation(step, step.costs.keys(), ("selective", "full"), held, [budget] * len(held))
        except PlanError:  # others take less, together, than all of them in full
            break
        points.append((peak(modes), step.recomputed_share(modes)))
    return points


def _gain(step: StepMemory, fqn: str, before: Mode, after: Mode) -> float:
    """Bytes saved for the operations that it costs."""
    saved = step.kept(fqn, before) - step.kept(fqn, after)
    return saved / max(step.recomputation(fqn, after) - step.recomputation(fqn, before), 1)


def _too_much(
    step: StepMemory,
    rank: int,
    peak: int,
    held: StaticMemory,
    budget: int,
    modes: Mapping[str, Mode],
    *,
    is_least: bool,
) -> MemoryPlanError:
    plan = step.plan
    states = held.weights + held.gradients + held.optimizer_states
    num = sum(mode != "none" for mode in modes.values())
    at_least = "at least " if is_least else ""
    further = [] if is_least else ["activations.recompute='auto'"]
    if plan.zero_stage < 3:
        further.append(f"zero.stage above {plan.zero_stage} with more data-parallel ranks")
    further.append(f"pipeline_parallel_size above {plan.shape.pp}")
    further.append(f"tensor_parallel_size above {plan.shape.tp}")
    further.append("a smaller batch")
    if plan.shape.pp > 1:
        further.append(f"pipeline.num_microbatches above {plan.num_microbatches}")
    return MemoryPlanError(
        f"Rank {rank} of the pipeline needs {at_least}{size_text(peak)} in a training step, with {num} blocks"
        f" recomputed, but activations.budget is {size_text(budget)}: {size_text(held.weights)} of weights,"
        f" {size_text(held.gradients)} of gradients, {size_text(held.optimizer_states)} of optimizer states and"
        f" {size_text(max(peak - states, 0))} of activations and buffers. What would help: {', '.join(further)}; or a"
        " larger budget."
    )
