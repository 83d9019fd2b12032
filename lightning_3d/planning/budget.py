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
from torch import nn

from lightning_3d.activations.chosen_blocks import chosen_blocks
from lightning_3d.config.activations import Mode
from lightning_3d.config.settings import ThreeDConfig
from lightning_3d.distributed.agreement import on_one_rank
from lightning_3d.distributed.device_memory import available_memory, total_memory
from lightning_3d.distributed.mesh import Mesh
from lightning_3d.errors import MemoryPlanError, PlanError
from lightning_3d.memory.rank_memory import RankMemory, StaticMemory, size_text
from lightning_3d.planning.held import StateMemory, bytes_of
from lightning_3d.planning.plan import Plan
from lightning_3d.planning.step_memory import StepMemory

_NUM_BUDGETS = 10  # that are tried for `trade_offs`


@dataclass(kw_only=True)
class Budget:
    """A training step that has to fit."""

    step: StepMemory
    batch: Any
    """A microbatch."""

    _first: int | None = None
    _has_warned: bool = False

    def look_at(self, batch: object) -> None:
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
        held: StateMemory,
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
        blocks = plan.blocks_in(module)
        return on_one_rank(lambda: decide_recomputation(plan, self.step, blocks, config, of_ranks, budgets))


def decide_recomputation(
    plan: Plan,
    step: StepMemory,
    blocks: Mapping[str, nn.Module],
    config: ThreeDConfig,
    held: Sequence[StaticMemory],
    budgets: Sequence[int],
) -> Plan:
    """The plan with what is recomputed, and the memory of all ranks, by what they hold anyway and may take, in bytes.

    Raises:
        PlanError: a rank does not fit.
    """
    modes = {block.fqn: block.recompute for block in plan.blocks}
    if config.activations.recompute == "auto":
        # Compiled blocks on shards keep inputs in full, too.
        is_counted = not config.compile.enabled or config.tensor_parallel_size == 1
        ways: tuple[Mode, ...] = ("selective", "full") if is_counted else ("full",)
        chosen = chosen_blocks(blocks, config.activations)
        modes = choose_recomputation(plan, step, chosen, ways, held, budgets)
        plan = plan.with_blocks(lambda block: replace(block, recompute=modes.get(block.fqn, "none")))
    rows = []
    for rank, (own, budget) in enumerate(zip(held, budgets, strict=True)):
        peak = step.peak(rank, step.stages_on(plan, rank), modes, own)
        if peak > budget:
            raise _too_much(plan, rank, peak, own, budget, modes, is_least=False)
        rows.append(RankMemory(held=own, peak=peak, budget=budget))
    return replace(plan, memory=tuple(rows))


def choose_recomputation(
    plan: Plan,
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
        fqns = [block.fqn for block in plan.blocks_on(rank) if block.fqn in candidates and block.fqn in step.costs]
        stages = step.stages_on(plan, rank)
        least, least_modes = step.peak(rank, stages, chosen, own), dict(chosen)
        while (peak := step.peak(rank, stages, chosen, own)) > budget:
            if peak < least:
                least, least_modes = peak, dict(chosen)
            changes = [(_gain(step, fqn, chosen.get(fqn, "none"), way), fqn, way) for fqn in fqns for way in ways]
            gain, fqn, way = max(changes, key=lambda change: change[0], default=(0.0, "", "none"))
            if gain <= 0:
                raise _too_much(plan, rank, least, own, budget, least_modes, is_least=True)
            chosen[fqn] = way
    return chosen


def trade_offs(plan: Plan, step: StepMemory) -> list[tuple[int, float]]:
    """The largest peak of a rank, in bytes, and the share of operations that are computed again for it, by budgets from
    the peak without recomputation to the least that any gives.

    Args:
        plan: With the memory of the ranks.
    """
    held, stages = [rank.held for rank in plan.memory], [step.stages_on(plan, rank) for rank in range(plan.shape.pp)]

    def peak(modes: Mapping[str, Mode]) -> int:
        return max(step.peak(rank, stages[rank], modes, own) for rank, own in enumerate(held))

    most, least = peak({}), peak(dict.fromkeys(step.costs, "full"))
    points = []
    for level in range(_NUM_BUDGETS + 1):
        budget = most - (most - least) * level // _NUM_BUDGETS
        try:
            modes = choose_recomputation(
                plan, step, step.costs.keys(), ("selective", "full"), held, [budget] * len(held)
            )
        except PlanError:  # others take less, together, than all of them in full
            break
        points.append((peak(modes), step.recomputed_share(modes)))
    return points


def _gain(step: StepMemory, fqn: str, before: Mode, after: Mode) -> float:
    """Bytes saved for the operations that it costs."""
    saved = step.kept(fqn, before) - step.kept(fqn, after)
    return saved / max(step.recomputation(fqn, after) - step.recomputation(fqn, before), 1)


def _too_much(
    plan: Plan,
    rank: int,
    peak: int,
    held: StaticMemory,
    budget: int,
    modes: Mapping[str, Mode],
    *,
    is_least: bool,
) -> MemoryPlanError:
    states = held.weights + held.gradients + held.optimizer_states
    num = sum(mode != "none" for mode in modes.values())
    at_least = "at least " if is_least else ""
    further = [] if is_least else ["activations.recompute='auto'"]
    if plan.zero_stage < 3:
        further.append(f"zero.stage above {plan.zero_stage} with more data-parallel ranks")
    further.append(f"pipeline_parallel_size above {plan.shape.pp}")
    further.append(f"tensor_parallel_size above {plan.shape.tp}")
    further.append(f"context_parallel_size above {plan.shape.cp}")
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
