"""Deciding for each step how its loss, and what else it gives, is made of its microbatches; alike on all ranks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from functools import reduce

import torch
import torch.distributed as dist
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn

from lightning_3d.errors import StepError, ThreeDError
from lightning_3d.pipeline.effects.join import Average
from lightning_3d.pipeline.loss_kind import LossKind
from lightning_3d.pipeline.loss_study import LossFound, LossStudy
from lightning_3d.pipeline.traces import StepCall
from lightning_3d.waits import Wait

_MAX_STUDIES = 8  # of a step
_SAYS = {
    LossKind.MEAN: "is the mean of those of the microbatches",
    LossKind.SUM: "is the sum of those of the microbatches",
    LossKind.WEIGHTED: "is a mean of those of the microbatches with weights that depend on the data, such as numbers of"
    " valid labels",
    LossKind.WHOLE: "couples samples, as a contrastive loss does: the code after the blocks runs once, on the whole"
    " batch, between all forwards and all backwards, which holds the activations of all microbatches. Each of several"
    " data-parallel ranks couples its own samples alone, as under DDP; a loss over all of them gathers outputs by"
    " self.all_gather(..., sync_grads=True)",
}


@dataclass(frozen=True, kw_only=True)
class Decision:
    """How a step is made of its microbatches."""

    kind: LossKind
    weights: Sequence[float]
    """Factors of the microbatches' losses; only the last stage knows those that depend on data."""
    averages: Mapping[str, Set[Average]] = field(default_factory=dict)
    """As of a ``LossFound``."""
    joins_values: bool
    """Whether what the step gives is joined over microbatches; else the code after the blocks runs on the whole batch
    for it."""
    views: Sequence[int] | None = None
    """In what the code after the blocks gets, where it runs on the whole batch (``row_order.py``); only the last stage
    knows them."""
    problem: ThreeDError | None = None
    """Found by the last stage, to be raised on all ranks."""


class BatchLoss:
    """Finds out once how each kind of step is made of its microbatches, and looks again at new kinds of batches.

    Args:
        setting: ``pipeline.loss``.
        group: The pp axis.
        source: Global rank of the last stage.
        has_budget: Whether ``activations.budget`` is kept by a prediction for losses that are not of the whole batch.
    """

    def __init__(
        self,
        setting: str,
        study: LossStudy,
        *,
        group: dist.ProcessGroup,
        source: int,
        device: torch.device,
        wait: Wait,
        has_budget: bool = False,
    ) -> None:
        self._wait, self._warns_of_memory = wait, has_budget
        self._setting, self._study, self._group, self._source, self._device = setting, study, group, source, device
        self._is_last = dist.get_rank() == source
        self._found: dict[str, LossFound] = {}  # by name of the step
        self._seen: set[Hashable] = set()
        self._num_studies: Counter[str] = Counter()

    @property
    def texts(self) -> tuple[str, ...]:
        """A line for each kind of step that gives anything but means over microbatches; for the plan."""
        return tuple(text for name, found in self._found.items() for text in _texts(name, found))

    def decide(self, whole: StepCall, parts: Sequence[StepCall], shares: Sequence[float], *, trains: bool) -> Decision:
        """Decide how a step is made; every rank calls it.

        Args:
            parts: The same step on each microbatch.
            shares: The microbatches' shares of the samples.
            trains: Whether the loss is differentiated; else only what the step gives counts.

        Raises:
            StepError: the loss of this kind of batch couples samples, unlike those before.
        """
        found = self._find(whole, parts) if trains else LossFound(kind=LossKind.MEAN)
        if len(parts) == 1:
            return Decision(kind=LossKind.MEAN, weights=shares, joins_values=True)
        can_join = trains and found.kind != LossKind.WHOLE and all(found.averages.values())
        decision = Decision(
            kind=found.kind,
            weights=[1.0] * len(parts) if found.kind == LossKind.SUM else shares,
            averages=found.averages,
            joins_values=can_join and not self._study.trace(parts[0]).gives_more,
        )
        if not self._is_last:
            return decision
        try:
            if not decision.joins_values:
                decision = replace(decision, views=self._study.views(whole, parts))
            if found.kind == LossKind.WEIGHTED:
                decision = replace(decision, weights=self._study.weights(whole, parts, min(found.denominators)))
        except ThreeDError as error:  # the other stages are told at the end of the step
            return replace(decision, problem=error)
        except Exception as error:
            what = f"{type(error).__name__} while finding how a batch is made of its microbatches: {error}"
            problem = StepError(what)
            problem.__cause__ = error
            return replace(decision, problem=problem)
        return decision

    def _find(self, whole: StepCall, parts: Sequence[StepCall]) -> LossFound:
        if self._setting == "mean":
            return LossFound(kind=LossKind.MEAN)
        if self._setting == "whole":
            return LossFound(kind=LossKind.WHOLE)
        if len(parts) > 1 and self._study.trace(parts[0]).is_joint:
            self._warn_of_memory(whole.name)
            return LossFound(kind=LossKind.WHOLE)
        return self._know(whole, parts) or LossFound(kind=LossKind.WHOLE)  # nothing valid to study yet

    def _know(self, whole: StepCall, parts: Sequence[StepCall]) -> LossFound | None:
        name = whole.name
        known = self._found.get(name)
        is_new = len(parts) > 1 and whole.kind not in self._seen and self._num_studies[name] < _MAX_STUDIES
        if known is not None and not is_new:
            return known
        new: LossFound | None = None
        with self._wait(f"Finding out how the loss of {name} comes from microbatches"):
            if is_new:
                self._seen.add(whole.kind)
                self._num_studies[name] += 1
                if self._is_last:
                    new = self._study.find(whole, size=parts[-1].size)
                    if new is not None and self._setting == "sum":
                        new = replace(new, kind=LossKind.SUM)
            if known is None:
                gathered: list[LossFound | None] = [None] * dist.get_world_size()
                dist.all_gather_object(gathered, new)
            else:
                gathered = [new]
                dist.broadcast_object_list(gathered, src=self._source, group=self._group, device=self._device)
        # A part of one sample may be no batch that the step takes: what others have shown holds.
        shown = [found for found in gathered if found is not None and (known is None or found.failure is None)]
        of_all = shown if known is None else [known, *shown]
        if not of_all:  # until a batch shows it
            self._seen.discard(whole.kind)
            return None
        joined = reduce(_stricter, of_all)
        if known is None:
            self._tell(name, joined)
        elif joined.kind > known.kind:
            raise StepError(
                f"{name}: that the loss {_SAYS[known.kind]} holds for batches before, but not for those of another kind"
                " that have come now. Set pipeline.loss='whole'."
            )
        self._found[name] = joined
        return joined

    def _tell(self, name: str, found: LossFound) -> None:
        """Say what was found, if it costs something."""
        if found.failure is not None:
            rank_zero_warn(
                f"How the loss of {name} comes from its microbatches could not be found out ({found.failure}), so it"
                " counts as one that couples samples. If it is a mean or a sum over them, set pipeline.loss='mean' or"
                " 'sum'."
            )
        if found.kind == LossKind.WHOLE:
            rank_zero_info("\n".join(_texts(name, found)))
            self._warn_of_memory(name)

    def _warn_of_memory(self, name: str) -> None:
        """Once, that a step takes more memory than was predicted."""
        if self._warns_of_memory:
            self._warns_of_memory = False
            rank_zero_warn(
                f"{name} holds the activations of all microbatches at once, as its loss is one of the whole batch, for"
                " which activations.budget was not planned: a rank may take more memory than predicted. Set"
                " pipeline.loss='whole', which plans for it."
            )


def _stricter(first: LossFound, second: LossFound) -> LossFound:
    """A finding that is right where either of these is."""
    averages = {**first.averages, **second.averages}
    averages |= {name: ways & averages[name] for name, ways in first.averages.items()}
    kind, denominators = max(first.kind, second.kind), first.denominators & second.denominators
    return LossFound(
        kind=LossKind.WHOLE if kind == LossKind.WEIGHTED and not denominators else kind,
        averages=averages,
        denominators=denominators,
        failure=first.failure or second.failure,
    )


def _texts(name: str, found: LossFound) -> list[str]:
    texts = [f"{name}: the loss {_SAYS[found.kind]}."] if found.kind != LossKind.MEAN else []
    unjoined = [value for value, ways in found.averages.items() if not ways]
    if unjoined and found.kind != LossKind.WHOLE:
        texts.append(
            f"{name}: {', '.join(unjoined)} can't be put together from microbatches; the code after the blocks runs"
            " once more, on the whole batch, for that."
        )
    return texts
