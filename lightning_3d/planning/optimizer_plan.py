"""Who steps what: a row per optimizer in the plan."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from rich.table import Table
from torch import nn
from torch.optim import Optimizer

from lightning_3d.zero.engine import Zero
from lightning_3d.zero.optimizer_kind import OptimizerKind

KindFound = Literal["known", "tried on small tensors", "set by zero.optimizer_steps"]


@dataclass(frozen=True, kw_only=True)
class OptimizerPlan:
    """How one optimizer's parameters are shared by the ranks."""

    name: str
    """Its class."""
    kind: OptimizerKind
    found: KindFound
    """How the kind was found."""
    shares: str
    """Who steps what."""


def plan_optimizer(
    optimizer: Optimizer,
    kind: OptimizerKind,
    found: KindFound,
    zero: Zero,
    stages: Mapping[nn.Parameter, tuple[int, ...]],
) -> OptimizerPlan:
    """The plan of an optimizer whose parameters were divided; the same on all ranks.

    Args:
        stages: Parameter -> the ranks of the pp axis that hold it.
    """
    parameters = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
    shares = "what each rank holds"
    if kind == "rows" and zero.num_sharing > 1:
        shares = f"rows of each parameter over {zero.num_sharing} ranks"
    elif owned := [parameter for parameter in parameters if parameter in zero.owners]:
        largest = _largest_share(owned, zero.owners, stages)
        shares = f"whole parameters, {len(owned)} over {zero.num_sharing} ranks, largest share {largest:.0%}"
    return OptimizerPlan(name=type(optimizer).__name__, kind=kind, found=found, shares=shares)


def _largest_share(
    parameters: Sequence[nn.Parameter],
    owners: Mapping[nn.Parameter, int],
    stages: Mapping[nn.Parameter, tuple[int, ...]],
) -> float:
    """The greatest part of a pipeline stage's elements that one rank owns."""
    loads: Counter[tuple[int, int]] = Counter()
    totals: Counter[int] = Counter()
    for parameter in parameters:
        for stage in stages[parameter]:
            loads[stage, owners[parameter]] += parameter.numel()
            totals[stage] += parameter.numel()
    return max(load / max(1, totals[stage]) for (stage, _), load in loads.items())


def optimizer_table(optimizers: Sequence[OptimizerPlan]) -> Table:
    """A row per optimizer."""
    table = Table(title="optimizers")
    for column in ("optimizer", "steps", "as", "each rank"):
        table.add_column(column, justify="left")
    for plan in optimizers:
        table.add_row(plan.name, plan.kind, plan.found, plan.shares)
    return table
