"""The cheapest blocks to recompute so that every rank stays within its budget."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from lightning_3d.config.activations import Mode
from lightning_3d.errors import PlanError
from lightning_3d.memory.rank_memory import HeldMemory, size_text
from lightning_3d.planning.budget.step_memory import StepMemory

_Peak = Callable[[Sequence["_Change"]], int]
"""Changes -> bytes that a rank takes with them."""


@dataclass(frozen=True, kw_only=True)
class _Change:
    """One more thing to compute again."""

    fqn: str
    before: Mode
    after: Mode
    saved: int
    """Bytes of a microbatch."""
    cost: int

    @property
    def gain(self) -> float:
        """Bytes saved for the time that it costs."""
        return self.saved / max(self.cost, 1)


def choose_recomputation(
    step: StepMemory,
    candidates: Collection[str],
    modes: Sequence[Mode],
    held: Sequence[HeldMemory],
    budgets: Sequence[int],
) -> dict[str, Mode]:
    """Block FQN -> how it is recomputed, of those that are.

    Each rank for itself takes the changes that save the most bytes for the time that they cost, and no more of them
    than it needs; of equal blocks the first, whose activations wait the longest. Changes that turn out not to be needed
    beside later ones are taken back, the most costly first.

    Args:
        candidates: FQNs of the blocks that may be recomputed.
        modes: How, the one that saves less first.
        held: What the ranks hold anyway, by index on the pp axis.
        budgets: Bytes that each of them may take.

    Raises:
        PlanError: a rank does not fit, whatever is recomputed.
    """
    chosen: dict[str, Mode] = {}
    for rank, budget in enumerate(budgets):
        own = [block.fqn for block in step.plan.blocks_on(rank) if block.fqn in candidates and block.fqn not in chosen]
        changes = sorted((c for fqn in own for c in _changes(step, fqn, modes)), key=lambda c: c.gain, reverse=True)
        peak = partial(_peak, step, rank, held, chosen)
        needed = _first_that_fit(changes, peak, budget)
        if needed is None:
            least = min((changes[:n] for n in range(len(changes) + 1)), key=peak)
            raise _too_much(step, rank, peak(least), held[rank], budget, _after(least), is_least=True)
        chosen |= _after(_without_idle(needed, peak, budget))
    return chosen


def _peak(
    step: StepMemory, rank: int, held: Sequence[HeldMemory], chosen: Mapping[str, Mode], changes: Sequence[_Change]
) -> int:
    """That of one rank."""
    return step.peaks({**chosen, **_after(changes)}, held)[rank]


def _first_that_fit(changes: Sequence[_Change], peak: _Peak, budget: int) -> Sequence[_Change] | None:
    """As many of the changes as are needed."""
    return next((changes[:n] for n in range(len(changes) + 1) if peak(changes[:n]) <= budget), None)


def _without_idle(changes: Sequence[_Change], peak: _Peak, budget: int) -> Sequence[_Change]:
    """The changes that are needed beside the others."""
    for change in sorted(changes, key=lambda c: c.cost, reverse=True):
        less = [other for other in changes if other is not change]
        if _is_whole(less) and peak(less) <= budget:
            changes = less
    return changes


def _changes(step: StepMemory, fqn: str, modes: Sequence[Mode]) -> list[_Change]:
    """The steps from no recomputation of a block to that which saves the most, each with less gain than the last."""
    changes: list[_Change] = []
    for mode in modes:
        before: Mode = changes[-1].after if changes else "none"
        change = _change(step, fqn, before, mode)
        while changes and change.gain >= changes[-1].gain:  # both at once
            change = _change(step, fqn, changes.pop().before, mode)
        if change.saved > 0:
            changes.append(change)
    return changes


def _change(step: StepMemory, fqn: str, before: Mode, after: Mode) -> _Change:
    saved = step.kept(fqn, before) - step.kept(fqn, after)
    return _Change(
        fqn=fqn, before=before, after=after, saved=saved, cost=step.cost(fqn, after) - step.cost(fqn, before)
    )


def _after(changes: Sequence[_Change]) -> dict[str, Mode]:
    return {change.fqn: change.after for change in changes}


def _is_whole(changes: Sequence[_Change]) -> bool:
    """Whether each change begins where the one before it of the same block ended."""
    now: dict[str, Mode] = {}
    for change in changes:
        if now.get(change.fqn, "none") != change.before:
            return False
        now[change.fqn] = change.after
    return True


def check_fits(
    step: StepMemory, modes: Mapping[str, Mode], held: Sequence[HeldMemory], budgets: Sequence[int]
) -> list[int]:
    """The predicted peaks.

    Raises:
        PlanError: one of them is above its budget.
    """
    peaks = step.peaks(modes, held)
    for rank, (peak, budget) in enumerate(zip(peaks, budgets, strict=True)):
        if peak > budget:
            raise _too_much(step, rank, peak, held[rank], budget, modes, is_least=False)
    return peaks


def _too_much(
    step: StepMemory,
    rank: int,
    peak: int,
    held: HeldMemory,
    budget: int,
    modes: Mapping[str, Mode],
    *,
    is_least: bool,
) -> PlanError:
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
    return PlanError(
        f"Rank {rank} of the pipeline needs {at_least}{size_text(peak)} in a training step, with {num} blocks"
        f" recomputed, but activations.budget is {size_text(budget)}: {size_text(held.weights)} of weights,"
        f" {size_text(held.gradients)} of gradients, {size_text(held.optimizer_states)} of optimizer states and"
        f" {size_text(max(peak - states, 0))} of activations and buffers. What would help: {', '.join(further)}; or a"
        " larger budget."
    )
