"""Calls that the microbatches of a step would make, noted to be made once for the batch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Generic, TypeVar

from lightning_3d.pipeline.effects.effect import Place
from lightning_3d.trace.interception import Router

C = TypeVar("C")


class CallNotes(Generic[C]):
    """Calls by stage and microbatch.

    A call made in a block is noted by the stage that runs the block; one made in glue, which runs on several stages, by
    the last. Calls outside of a microbatch, in recomputed forwards, are dropped.

    Args:
        router: Tells glue from blocks.
    """

    def __init__(self, router: Router) -> None:
        self._router = router
        self._calls: dict[tuple[int, int], list[C]] = {}
        self._place: Place | None = None
        self.in_blocks = False
        """Whether a block made one in a trace."""

    def clear(self) -> None:
        """Forget the calls of the last step."""
        self._calls = {}

    @contextmanager
    def microbatch(self, place: Place) -> Iterator[None]:
        """Note the calls made inside as those of this microbatch on this stage."""
        self._place = place
        self.set(place, [])
        try:
            yield
        finally:
            self._place = None

    def add(self, call: C) -> int:
        """Note a call if it counts; returns how many calls of the microbatch came before."""
        place = self._place
        if place is None:
            return 0
        is_in_block = self._router.step is None
        self.in_blocks |= is_in_block and place.is_trace
        calls = self.at(place)
        if is_in_block or place.is_last:
            calls.append(call)
            return len(calls) - 1
        return len(calls)

    def at(self, place: Place) -> list[C]:
        """The calls of a microbatch on a stage."""
        return self._calls[place.stage, place.microbatch]

    def set(self, place: Place, calls: list[C]) -> None:
        """Replace the calls of a microbatch on a stage."""
        self._calls[place.stage, place.microbatch] = calls

    def of_stage(self, stage: int, num_microbatches: int) -> list[list[C]]:
        """The calls of every microbatch."""
        return [self._calls[stage, index] for index in range(num_microbatches)]
