"""The protocol of everything that a step does beside its loss.

[Note: effects]
With a pipeline a step runs once per microbatch, and on every stage up to where it leaves; in one process it runs once
per batch, to its end. An effect makes up for the difference:

    with effect.begin(number):                        every step
        with effect.microbatch(place):                every microbatch on every stage of this rank: nothing stays
            found = effect.collect(place)             at the end of the user's code: the tensors that it gave
            found = effect.kept(found)                the same with the data behind ghosts filled in
    joined = effect.join(stage, all found, sizes)     what one step on the whole batch would have done
    effect.apply(joined, is_own=...)                  on every rank, for every stage that reports

A trace runs the same up to ``collect``. If an effect then gives more than numbers, which can be joined over
microbatches, the code after the blocks runs once on the whole batch, as one microbatch, and that is what counts. A new
effect is one class here and one line in ``step_effects.py``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, TypeVar

from torch import Tensor
from typing_extensions import override

from lightning_3d.torch_internals.pytree import tree_map_only
from lightning_3d.trace.interception import Router


@dataclass(frozen=True, kw_only=True)
class StepContext:
    """Where and what runs."""

    stage: int
    microbatch: int
    """Index in the batch."""
    is_last: bool
    """Whether it is the last stage, which alone runs the step to its end."""
    is_trace: bool = False
    runs_on_full_batch: bool = False
    """Whether the step runs on the whole batch, too, besides its microbatches."""


class Effect:
    """One kind of thing that a step does beside its loss; as it stands here, nothing."""

    @property
    def is_on_all_stages(self) -> bool:
        """Whether other stages than the last may do it, so that all report; equal on all ranks."""
        return False

    @property
    def has_side_effects(self) -> bool:
        """Whether the present microbatch did what can't be joined over microbatches; asked after ``collect``."""
        return False

    def begin(self, number: int) -> AbstractContextManager[None]:
        """Around a step, of which ``number`` counts all, or its trace."""
        return nullcontext()

    def microbatch(self, context: StepContext) -> AbstractContextManager[None]:
        """Around the user's step on one microbatch; leaves no change behind."""
        return nullcontext()

    def collect(self, context: StepContext) -> object:
        """Tensors that the step gave, as they are in it, and other data: a pytree that may hold ghosts.

        Called when the user's step has returned, or on other stages than the last when it was left.
        """

    def kept(self, found: Any) -> object:
        """Make what ``collect`` gave, with data in place of ghosts, fit to be kept; still inside of ``microbatch``."""
        return tree_map_only(Tensor, Tensor.detach, found)

    def join(self, stage: int, found: Sequence[Any], sizes: Sequence[int]) -> object:
        """Find out what one step on the whole batch would have done, to send it to all ranks; called after the step.

        Args:
            stage: Index of a stage of this rank, or of the code after the blocks on the whole batch.
            found: What ``kept`` gave, by microbatch, where that stage ends the step; else empty.
            sizes: Samples in each microbatch.

        Raises:
            StepError: the microbatches gave what their trace did not show, and can't be joined.
        """

    def apply(self, merged: Any, *, is_own: bool) -> None:
        """Do it here.

        Args:
            merged: What ``join`` gave for a stage.
            is_own: Whether that was on this rank.
        """

    def undo(self) -> None:
        """In place of ``apply``, where the step has failed: leave nothing of it, also of what ``join`` did."""


C = TypeVar("C")


class NotedCalls(Effect, Generic[C]):
    """Calls that a step makes of its logger or its metrics, noted by the last stage to be made after it, with data in
    place of ghosts. Those outside of a microbatch, in recomputed forwards, are dropped.

    Args:
        router: Tells glue from blocks.
    """

    kind: ClassVar[str]
    """Name of the thing that is called, for errors."""

    def __init__(self, router: Router) -> None:
        self._router = router
        self._place: StepContext | None = None
        self._present: list[C] = []  # of what runs now
        self.in_block: str | None = None
        """A call that a block made in the trace."""

    @override
    @contextmanager
    def microbatch(self, context: StepContext) -> Iterator[None]:
        self._place, self._present = context, []
        if context.is_trace:
            self.in_block = None
        try:
            yield
        finally:
            self._place, self._present = None, []

    def _note(self, name: str, call: C) -> None:
        """Note a call, a pytree, if it counts; its name is the same in every microbatch."""
        if self._place is None:
            return
        if self._router.step is None and self._place.is_trace:
            self.in_block = f"{self.kind} ({name})"
        if self._place.is_last:
            self._present.append(call)

    @override
    def collect(self, context: StepContext) -> list[C]:
        return self._present
