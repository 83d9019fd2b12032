"""Deciding for each step how its loss, and what else it gives, is made of its microbatches; alike on all ranks."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Hashable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from functools import partial, reduce
from typing import TypeAlias

import torch
import torch.distributed as dist
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn

from lightning_3d.distributed.agreement import gather_numbers
from lightning_3d.errors import StepError, ThreeDError
from lightning_3d.pipeline.effects.merge import Reduction
from lightning_3d.pipeline.glue_run import CoupledError
from lightning_3d.pipeline.glue_seen import SeenGlue
from lightning_3d.pipeline.loss_kind import LossKind
from lightning_3d.pipeline.loss_study import LossFound, LossStudy
from lightning_3d.pipeline.traces import StepCall, cached
from lightning_3d.waits import long_wait

_MAX_FRUITLESS = 8  # studies of a step that show nothing, as its loss is not finite
_MAX_NAMED = 3  # blocks in a message
_MAX_DOUBTS = 100  # times that a step is studied again, as it does otherwise than before
_Path: TypeAlias = "tuple[str, Hashable]"  # of a step of this name
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
class LossReduction:
    """How a step is made of its microbatches."""

    kind: LossKind
    weights: Sequence[float]
    """Factors of the microbatches' losses; only the last stage knows those that depend on data."""
    averages: Mapping[str, Set[Reduction]] = field(default_factory=dict)
    """As of a ``LossFound``."""
    ends_in_trace: bool = False
    """As of a ``LossFound``; of a loss that is not of the whole batch."""
    joins_values: bool
    """Whether what the step gives is joined over microbatches; else the code after the blocks runs on the whole batch
    for it."""
    repeats_per_sample: Sequence[int] | None = None
    """In what the code after the blocks gets, where it runs on the whole batch (``row_order.py``); only the last stage
    knows them."""
    glue: SeenGlue | None = None
    """The computations that all of this holds for, where it was found out by steps."""
    problem: ThreeDError | None = None
    """Found by the last stage, to be raised on all ranks."""


class BatchLoss:
    """Finds out how each kind of step is made of its microbatches.

    A finding holds for the path that it was made on: the calls that a step makes (``Trace.path``) with its flags, and
    with its decisions by the epoch, the step and the batch; and for the numbers of samples in its microbatches, as
    ``rows[0::2] - rows[1::2]`` joins pairs of an even number alone. Batches of other lengths that take the same path
    share it: how a loss joins samples is a matter of what is called, not of how large the rest is. A later step that
    computes what it hands to blocks otherwise (``glue_seen.py``) is studied, too; the finding is then right for both.

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
        has_budget: bool = False,
    ) -> None:
        self._warns_of_memory = has_budget
        self._setting, self._study, self._group, self._source, self._device = setting, study, group, source, device
        self._is_last = dist.get_rank() == source
        self._is_by_microbatch = setting in ("mean", "sum")  # the user's word
        self._found: dict[_Path, LossFound] = {}
        self._glue: dict[_Path, SeenGlue] = {}  # as of these findings
        self._present: SeenGlue | None = None  # of the last step
        self._num_doubts = 0
        self._paths: OrderedDict[Hashable, _Path] = OrderedDict()  # by kind of call
        self._told: dict[str, LossKind] = {}  # by name of the step: the strictest that was found
        self._num_fruitless: Counter[str] = Counter()  # studies of a step

    @property
    def texts(self) -> tuple[str, ...]:
        """A line for each kind of step that gives anything but means over microbatches; for the plan."""
        return tuple(dict.fromkeys(text for (name, _), found in self._found.items() for text in _texts(name, found)))

    def decide(
        self, whole: StepCall, parts: Sequence[StepCall], shares: Sequence[float], *, trains: bool
    ) -> LossReduction:
        """Decide how a step is made; every rank calls it.

        Args:
            parts: The same step on each microbatch.
            shares: The microbatches' shares of the samples.
            trains: Whether the loss is differentiated; else only what the step gives counts.

        Raises:
            StepError: the code before or between the blocks couples samples.
        """
        found = self._find(whole, parts) if trains else LossFound(kind=LossKind.MEAN)
        if len(parts) == 1:
            return LossReduction(kind=LossKind.MEAN, weights=shares, joins_values=True)
        can_join = trains and found.kind != LossKind.WHOLE and all(found.averages.values())
        decision = LossReduction(
            kind=found.kind,
            weights=[1.0] * len(parts) if found.kind == LossKind.SUM else shares,
            averages=found.averages,
            ends_in_trace=found.ends_in_trace and found.kind != LossKind.WHOLE and not self._is_by_microbatch,
            joins_values=can_join and not self._study.trace(parts[0]).has_side_effects,
            glue=self._present if trains and not self._is_by_microbatch else None,
        )
        if not self._is_last:
            return decision
        try:
            if not decision.joins_values:
                decision = replace(decision, repeats_per_sample=self._study.repeats_per_sample(whole, parts))
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

    def doubts(self) -> bool:
        """The last step did otherwise than those that were studied; returns whether it is when it runs again."""
        self._num_doubts += 1
        if self._present is not None:
            self._present.is_doubted = True
        return self._num_doubts <= _MAX_DOUBTS

    def _find(self, whole: StepCall, parts: Sequence[StepCall]) -> LossFound:
        """The finding about a step, which is known or made now.

        Raises:
            StepError: microbatches can't run it.
        """
        self._present = None
        if len(parts) == 1:
            if whole.name not in self._told:  # those of other replicas may show something
                self._study_together(whole, parts)
            return LossFound(kind=LossKind.MEAN)
        kinds = whole.kind, *(part.kind for part in parts)
        path = cached(self._paths, kinds, partial(self._path, whole, parts))
        glue = self._glue.setdefault(path, SeenGlue())
        if is_studied := path not in self._found or glue.is_doubted:
            if (found := self._study_together(whole, parts)) is None:
                return LossFound(kind=LossKind.WHOLE)  # nothing valid to study yet
            self._found[path] = _stricter(self._found.get(path, found), found)
        found, self._present = self._found[path], glue
        glue.is_studied, glue.is_doubted = is_studied, False
        if found.coupling is not None and not self._is_by_microbatch:
            raise StepError(str(found.coupling))
        return found

    def _path(self, whole: StepCall, parts: Sequence[StepCall]) -> _Path:
        """Collective. New on all ranks at once."""
        path = hash(self._study.trace(parts[0]).path)
        return whole.name, (whole.state, *(part.size for part in parts), *gather_numbers(path, self._group))

    def _study_together(self, whole: StepCall, parts: Sequence[StepCall]) -> LossFound | None:
        """Collective; of all ranks where nothing is known of a step, as batches may have too few samples on some. None
        until a batch shows something.
        """
        with long_wait(f"Finding out how the loss of {whole.name} comes from microbatches"):
            new = self._looked_at(whole, parts) if self._is_last and len(parts) > 1 else None
            if whole.name not in self._told:
                gathered: list[LossFound | None] = [None] * dist.get_world_size()
                dist.all_gather_object(gathered, new)
            else:
                gathered = [new]
                dist.broadcast_object_list(gathered, src=self._source, group=self._group, device=self._device)
        shown = [found for found in gathered if found is not None]
        self._num_fruitless[whole.name] += not shown
        if not shown and self._num_fruitless[whole.name] < _MAX_FRUITLESS:
            return None
        found = reduce(_stricter, shown, shown[0] if shown else LossFound(kind=LossKind.WHOLE))
        self._tell(whole.name, found)
        return found

    def _looked_at(self, whole: StepCall, parts: Sequence[StepCall]) -> LossFound | None:
        found = self._looked_at_loss(whole, parts)
        if found is None or whole.name in self._told:
            return found
        return replace(found, coupling_blocks=self._study.coupling_blocks(whole, size=parts[-1].size))

    def _looked_at_loss(self, whole: StepCall, parts: Sequence[StepCall]) -> LossFound | None:
        size = parts[-1].size
        coupling = self._study.coupling(whole, size=size)
        is_set = self._setting in ("mean", "whole") or (self._setting == "sum" and coupling is not None)
        if is_set or coupling is not None or self._study.trace(parts[0]).calls_collectives:
            return LossFound(kind=LossKind[self._setting.upper()] if is_set else LossKind.WHOLE, coupling=coupling)
        new = self._study.find(whole, size=size)
        return replace(new, kind=LossKind.SUM) if new is not None and self._setting == "sum" else new

    def _tell(self, name: str, found: LossFound) -> None:
        """Say what was found, if it costs something that was not said."""
        before = self._told.get(name)
        if before is not None and found.kind <= before:
            return
        self._told[name] = found.kind
        if found.coupling is None or self._is_by_microbatch:
            _warn_of_blocks(name, found.coupling_blocks)
        if isinstance(found.coupling, CoupledError) and self._is_by_microbatch:
            rank_zero_warn(
                f"{name}: each microbatch counts as a batch, as pipeline.loss={self._setting!r} says. {found.coupling}"
            )
        if found.failure is not None:
            rank_zero_warn(
                f"How the loss of {name} comes from its microbatches could not be found out ({found.failure}), so it"
                " counts as one that couples samples. If it is a mean or a sum over them, set pipeline.loss='mean' or"
                " 'sum'."
            )
        if found.kind == LossKind.WHOLE and found.coupling is None and self._setting != "whole":
            is_new = "" if before is None else f"{name} took another path than before, on which the loss is another. "
            rank_zero_info(is_new + "\n".join(_texts(name, found)))
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


def _warn_of_blocks(name: str, fqns: Sequence[str]) -> None:
    if not fqns:
        return
    more = f" and {len(fqns) - _MAX_NAMED} more" if len(fqns) > _MAX_NAMED else ""
    rank_zero_warn(
        f"{name}: {', '.join(fqns[:_MAX_NAMED])}{more}: these blocks couple the samples of their batch, which with a"
        " pipeline is a microbatch, so that they give other numbers than in one process. Set pipeline.mode=inline for"
        " those of one process."
    )


def _stricter(first: LossFound, second: LossFound) -> LossFound:
    """A finding that is right where either of these is."""
    averages = {**first.averages, **second.averages}
    averages |= {name: ways & averages[name] for name, ways in first.averages.items()}
    kind, denominators = max(first.kind, second.kind), first.denominators & second.denominators
    no_weights_fit = LossKind.SUM in (first.kind, second.kind) and first.kind != second.kind
    return LossFound(
        kind=LossKind.WHOLE if no_weights_fit or (kind == LossKind.WEIGHTED and not denominators) else kind,
        averages=averages,
        denominators=denominators,
        ends_in_trace=first.ends_in_trace and second.ends_in_trace,
        failure=first.failure or second.failure,
        coupling=first.coupling or second.coupling,
        coupling_blocks=tuple(dict.fromkeys((*first.coupling_blocks, *second.coupling_blocks))),
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
