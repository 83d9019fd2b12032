"""The tensor-parallel plans of a model as a table for people."""

from __future__ import annotations

from collections.abc import Iterable

from rich.table import Table

from lightning_3d.tensor.plan.block_plan import BlockTensorPlan


def tensor_table(blocks: Iterable[tuple[str, str, BlockTensorPlan]]) -> Table:
    """A row per weight and distinct plan.

    Args:
        blocks: (FQN, class, plan); blocks of one class with equal plans share their rows.
    """
    table = Table("block, weights", "plan", title="tensor parallel")
    table.add_column("sharded", justify="right")
    fqns: dict[tuple[str, BlockTensorPlan], list[str]] = {}
    for fqn, kind, plan in blocks:
        fqns.setdefault((kind, plan), []).append(fqn)
    for (kind, plan), names in fqns.items():
        others = f" and {len(names) - 1} more" if len(names) > 1 else ""
        table.add_section()
        table.add_row(f"{kind}: {names[0]}{others}", _collectives(plan), f"{plan.sharded_share:.0%}", style="bold")
        for weight in plan.weights if plan.is_sharded else ():
            decision = weight.role if weight.reason is None else f"{weight.role}: {weight.reason}"
            table.add_row(f"  {weight.fqn} {list(weight.shape)}", decision, "")
    return table


def _collectives(plan: BlockTensorPlan) -> str:
    if plan.reason is not None:
        return f"replicated: {plan.reason}"
    sequence = ", sequence parallel" if plan.is_sequence_parallel else ""
    if plan.not_sequence_parallel is not None:
        sequence = f", not sequence parallel: {plan.not_sequence_parallel}"
    others = f", {plan.num_other_collectives_forward} others" if plan.num_other_collectives_forward else ""
    return (
        f"{plan.num_all_reduces_forward} + {plan.num_all_reduces_backward} all-reduces{others}{sequence},"
        f" {plan.communicated_bytes / 2**10:,.0f} KiB"
    )
