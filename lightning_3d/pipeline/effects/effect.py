"""The protocol of everything that a step does beside its loss.

[Note: effects]
With a pipeline a step runs once per microbatch, and on every stage up to where it leaves; in one process it runs once
per batch, to its end. An effect makes up for the difference:

    with effect.begin(number):                        every step
        with effect.microbatch(place):                every microbatch on every stage of this rank: nothing stays
            found = effect.collect(place)             at the end of the user's code: the tensors that it gave
            effect.keep(place, found)                 the same with the data behind ghosts filled in
    joined = effect.join(stage, sizes)                what one step on the whole batch would have done
    effect.apply(joined, is_own=...)                  on every rank, for every stage that reports

A trace runs the same up to ``collect``. If an effect then gives more than numbers, which can be joined over
microbatches, the code after the blocks runs once on the whole batch, as one microbatch, and that is what counts. A new
effect is one class here and one line in ``step_effects.py``.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where and what runs."""

    stage: int
    microbatch: int
    """Index in the batch."""
    is_last: bool
    """Whether it is the last stage, which alone runs the step to its end."""
    is_trace: bool = False
    also_whole: bool = False
    """Whether the step runs on the whole batch, too, besides its microbatches."""


class Effect:
    """One kind of thing that a step does beside its loss; as it stands here, nothing."""

    @property
    def is_on_all_stages(self) -> bool:
        """Whether other stages than the last may do it, so that all report; equal on all ranks."""
        return False

    @property
    def gives_more(self) -> bool:
        """Whether the present microbatch did what can't be joined over microbatches; asked after ``collect``."""
        return False

    def begin(self, number: int) -> AbstractContextManager[None]:
        """Around a step, of which ``number`` counts all, or its trace."""
        return nullcontext()

    def microbatch(self, place: Place) -> AbstractContextManager[None]:
        """Around the user's step on one microbatch; leaves no change behind."""
        return nullcontext()

    def collect(self, place: Place) -> Any:
        """The tensors that the step gave, as they are in it: a pytree that may hold ghosts.

        Called when the user's step has returned, or on other stages than the last when it was left.
        """

    def keep(self, place: Place, found: Any) -> None:
        """Take what ``collect`` gave, with data in place of ghosts; still inside of ``microbatch``."""

    def join(self, stage: int, sizes: Sequence[int], *, is_last: bool) -> Any:
        """Find out what one step on the whole batch would have done, to send it to all ranks; called after the step.

        Args:
            stage: Index of a stage of this rank.
            sizes: Samples in each microbatch.
            is_last: Whether it is the last stage, or the code after the blocks on the whole batch.

        Raises:
            StepError: the microbatches gave what their trace did not show, and can't be joined.
        """

    def forget(self) -> None:
        """Let go of what microbatches did, in place of ``join`` and ``apply``."""

    def apply(self, joined: Any, *, is_own: bool) -> None:
        """Do it here.

        Args:
            joined: What ``join`` gave for a stage.
            is_own: Whether that was on this rank.
        """
