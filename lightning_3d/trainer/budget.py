"""Planning with a budget of memory: what is recomputed, once it is known what every rank holds."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from torch import nn
from torch.optim import Optimizer

from lightning_3d.activations.chosen_blocks import chosen_blocks
from lightning_3d.config.activations import Mode
from lightning_3d.config.settings import ThreeDConfig
from lightning_3d.distributed.agreement import on_rank_zero
from lightning_3d.distributed.device_memory import available_memory, total_memory
from lightning_3d.distributed.mesh import Mesh
from lightning_3d.memory.held import bytes_of, held_memory
from lightning_3d.memory.rank_memory import HeldMemory, RankMemory
from lightning_3d.planning.budget.choice import check_fits, choose_recomputation
from lightning_3d.planning.budget.step_memory import StepMemory
from lightning_3d.planning.plan import Plan
from lightning_3d.torch_internals.lightning_helpers import callbacks_of
from lightning_3d.zero.engine import Zero
from lightning_3d.zero.optimizer_kind import OptimizerKind


def accumulates(trainer: Trainer) -> bool:
    """Whether the gradients of several batches add up, in some epoch at least."""
    scheduled = (each for each in callbacks_of(trainer) if isinstance(each, GradientAccumulationScheduler))
    most = max((max(each.scheduling.values()) for each in scheduled), default=1)
    return max(most, trainer.accumulate_grad_batches) > 1


class FirstIsLargest:
    """Warns once of a batch of this rank that is larger than the first, with which a budget was planned."""

    def __init__(self) -> None:
        self._first: int | None = None
        self._has_warned = False

    def look_at(self, batch: Any) -> None:
        """Before a training step with it."""
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


@dataclass(frozen=True, kw_only=True)
class Budget:
    """A training step that has to fit."""

    step: StepMemory
    batch: Any
    """A microbatch."""

    batches: FirstIsLargest = field(default_factory=FirstIsLargest)

    def plan(
        self,
        plan: Plan,
        module: nn.Module,
        zero: Zero,
        kinds: Mapping[Optimizer, OptimizerKind],
        config: ThreeDConfig,
        mesh: Mesh,
        device: torch.device,
    ) -> Plan:
        """The plan with what is recomputed, and the memory of all ranks; every rank calls it.

        Raises:
            PlanError: a rank does not fit.
        """
        own = held_memory(module, zero, kinds, config, mesh, device, self.batch)
        num_local = int(os.environ.get("LOCAL_WORLD_SIZE", mesh.shape.world_size))
        available = available_memory(device, num_local, own.weights)
        everyone: list[Any] = [None] * mesh.shape.world_size
        mine = (mesh.pp_rank, own, config.activations.budget_bytes(total_memory(device, num_local), available))
        dist.all_gather_object(everyone, mine)
        held, budgets = _by_stage(everyone, mesh.shape.pp)
        return on_rank_zero(lambda: self._decide(plan, plan.blocks_in(module), config, held, budgets), device)

    def _decide(
        self,
        plan: Plan,
        blocks: Mapping[str, nn.Module],
        config: ThreeDConfig,
        held: Sequence[HeldMemory],
        budgets: Sequence[int],
    ) -> Plan:
        if config.activations.recompute == "auto":
            candidates = chosen_blocks(blocks, config.activations)
            # Compiled blocks on shards keep the random numbers that they are given, too, and inputs in full.
            is_counted = not config.compile.enabled or config.tensor_parallel_size == 1
            modes: tuple[Mode, ...] = ("selective", "full") if is_counted else ("full",)
            chosen = choose_recomputation(self.step, candidates, modes, held, budgets)
            plan = plan.with_recomputation(chosen)
        peaks = check_fits(self.step, {block.fqn: block.recompute for block in plan.blocks}, held, budgets)
        rows = zip(held, peaks, budgets, strict=True)
        return plan.with_memory(tuple(RankMemory(held=h, peak=peak, budget=b) for h, peak, b in rows))


def _by_stage(everyone: Sequence[tuple[int, HeldMemory, int]], pp: int) -> tuple[list[HeldMemory], list[int]]:
    """By index on the pp axis: the most that a rank there holds, and the least budget."""
    held, budgets = [], []
    for rank in range(pp):
        there = [(own, budget) for index, own, budget in everyone if index == rank]
        held.append(max((own for own, _ in there), key=lambda own: own.always + own.gradients))
        budgets.append(min(budget for _, budget in there))
    return held, budgets
