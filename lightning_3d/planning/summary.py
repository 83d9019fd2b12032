"""A few lines on a plan, for terminals and logs when a fit begins. Rich prints the whole plan."""

from __future__ import annotations

from lightning_3d.memory.rank_memory import StaticMemory, size_text
from lightning_3d.planning.inline_mode import inline_text, loss_text
from lightning_3d.planning.plan import Plan, batch_norms_text, folded, ranks_text

_SHARDED = {
    1: "optimizer states are",
    2: "optimizer states and gradients are",
    3: "optimizer states, gradients and parameters are",
}
_MOST_STAGES = 4  # that get a line each
_MOST_BLOCKS = 3  # of a stage that are named


def layout_text(plan: Plan, most: StaticMemory, num_sharing: int) -> str:
    """At most nine lines.

    Args:
        most: The most that any rank holds.
        num_sharing: Data-parallel ranks that share the training state.
    """
    shape = plan.shape
    lines = [f"Layout: {shape.world_size} ranks = {shape.text}", *_stages(plan)]
    if num_sharing > 1 and plan.zero_stage:
        lines.append(f"ZeRO stage {plan.zero_stage}: {_SHARDED[plan.zero_stage]} sharded over {num_sharing} ranks")
    if shape.tp > 1:
        lines.append(_tensor(plan))
    if shape.pp > 1 and plan.inline is None:
        lines.append(loss_text(plan.loss, has_side_effects=plan.has_side_effects))
    if norms := batch_norms_text(plan):
        lines.append(norms)
    lines.append(
        f"each rank holds at most {size_text(most.weights)} of weights, {size_text(most.gradients)} of gradients and"
        f" {size_text(most.optimizer_states)} of optimizer states"
    )
    return "\n  ".join(lines)


def _stages(plan: Plan) -> list[str]:
    if plan.num_stages == 1:
        return []
    lines = []
    for stage in range(plan.num_stages):
        blocks = folded([(block.fqn, block.kind) for block in plan.blocks_of(stage)])
        more = f" and {len(blocks) - _MOST_BLOCKS} more" if len(blocks) > _MOST_BLOCKS else ""
        num_parameters = sum(block.num_parameters for block in plan.blocks_of(stage))
        names = ", ".join(blocks[:_MOST_BLOCKS])
        lines.append(f"stage {stage} on {ranks_text(plan, stage)}: {names}{more}, {num_parameters:,} parameters")
    if len(lines) > _MOST_STAGES:
        lines[2:-1] = [f"... {len(lines) - 3} more stages ..."]
    if plan.inline is not None:
        return [*lines, inline_text(plan.inline)]
    return [*lines, f"schedule {plan.schedule}, with {plan.num_microbatches} microbatches in each batch"]


def _tensor(plan: Plan) -> str:
    """How much of the blocks is sharded, and why not the first that is not."""
    sharded = sum(block.num_parameters * block.tensor.sharded_share for block in plan.blocks if block.tensor)
    share = sharded / max(1, sum(block.num_parameters for block in plan.blocks))
    text = f"tensor parallel: {share:.0%} of the blocks' parameters are sharded over {plan.shape.tp} ranks"
    whole = [(block, tensor.reason) for block in plan.blocks if (tensor := block.tensor) is not None and tensor.reason]
    if not whole:
        return text
    block, reason = whole[0]
    are = f"and {len(whole) - 1} more are" if whole[1:] else "is"
    return f"{text}; {block.fqn} ({block.kind}) {are} replicated: {reason}"
