"""Calls that the microbatches of a step would make, noted to be made once for the batch."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Generic, TypeVar

from torch import Tensor
from typing_extensions import override

from lightning_3d.errors import StepError
from lightning_3d.pipeline.effects.effect import Effect, Place
from lightning_3d.pipeline.effects.join import Joiner
from lightning_3d.torch_internals.pytree import tree_map_only
from lightning_3d.trace.interception import Router


@dataclass(frozen=True, kw_only=True)
class Call:
    """A call that a step made; subclasses say of what."""

    name: str
    """The same in every microbatch."""
    given: Any
    """A pytree of what it was called with."""


C = TypeVar("C", bound=Call)


class NotedCalls(Effect, Generic[C]):
    """Calls of one kind, noted by stage and microbatch and joined over microbatches.

    A call made in a block is noted by the stage that runs the block; one made in glue, which runs on several stages, by
    the last. Calls outside of a microbatch, in recomputed forwards, are dropped.

    Args:
        router: Tells glue from blocks.
        joiner: Joins values over microbatches.
    """

    kind: ClassVar[str]
    """Name of the thing that is called, for errors."""

    def __init__(self, router: Router, joiner: Joiner) -> None:
        self._router, self._joiner = router, joiner
        self._calls: dict[tuple[int, int], list[C]] = {}  # stage, microbatch -> its calls
        self._place: Place | None = None
        self._in_blocks = False

    @abstractmethod
    def _join(self, calls: Sequence[C], sizes: Sequence[int]) -> C:
        """Join one call of every microbatch."""

    @property
    @override
    def is_on_all_stages(self) -> bool:
        """Whether a block made such a call in a trace so far."""
        return self._in_blocks

    @override
    @contextmanager
    def microbatch(self, place: Place) -> Iterator[None]:
        self._place = place
        self._calls[place.stage, place.microbatch] = []
        try:
            yield
        finally:
            self._place = None

    def _note(self, call: C) -> int:
        """Note a call if it counts; returns how many calls of the microbatch came before."""
        place = self._place
        if place is None:
            return 0
        is_in_block = self._router.step is None
        self._in_blocks |= is_in_block and place.is_trace
        calls = self._calls[place.stage, place.microbatch]
        if is_in_block or place.is_last:
            calls.append(call)
            return len(calls) - 1
        return len(calls)

    @override
    def collect(self, place: Place) -> list[Any]:
        return [call.given for call in self._calls[place.stage, place.microbatch]]

    @override
    def keep(self, place: Place, found: Sequence[Any]) -> None:
        calls = self._calls[place.stage, place.microbatch]
        detached = tree_map_only(Tensor, Tensor.detach, list(found))
        calls[:] = [replace(call, given=given) for call, given in zip(calls, detached, strict=True)]

    @override
    def study(self, stage: int, sizes: Sequence[int]) -> None:
        with suppress(StepError):
            self._joined(stage, sizes)

    def _joined(self, stage: int, sizes: Sequence[int]) -> list[C]:
        """The calls that one step on the whole batch would have made."""
        per_microbatch = [self._calls.pop((stage, index)) for index in range(len(sizes))]
        names = [[call.name for call in calls] for calls in per_microbatch]
        if any(other != names[0] for other in names):
            raise StepError(
                f"The microbatches of one batch made different calls of {self.kind}: {names}. Make the same calls in"
                " every step."
            )
        return [self._join(calls, sizes) for calls in zip(*per_microbatch, strict=True)]
