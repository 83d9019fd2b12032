"""Calls that a step makes of its logger and its metrics, noted to be made after it, with data in place of ghosts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Generic, TypeVar

from torch import Tensor
from typing_extensions import override

from lightning_3d.pipeline.effects.effect import Effect, Place
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
    """Calls of one kind, noted by the last stage. Those outside of a microbatch, in recomputed forwards, are dropped.

    Args:
        router: Tells glue from blocks.
    """

    kind: ClassVar[str]
    """Name of the thing that is called, for errors."""

    def __init__(self, router: Router) -> None:
        self._router = router
        self._calls: dict[int, Sequence[C]] = {}  # microbatch -> its calls
        self._place: Place | None = None
        self._present: list[C] = []  # of what runs now
        self.in_block: str | None = None
        """A call that a block made in the trace."""

    @override
    @contextmanager
    def microbatch(self, place: Place) -> Iterator[None]:
        self._place, self._present = place, []
        if place.is_trace:
            self.in_block = None
        try:
            yield
        finally:
            self._place, self._present = None, []

    def _note(self, call: C) -> int:
        """Note a call if it counts; returns how many calls of the microbatch came before."""
        if self._place is None:
            return 0
        if self._router.step is None and self._place.is_trace:
            self.in_block = f"{self.kind} ({call.name})"
        if self._place.is_last:
            self._present.append(call)
        return max(0, len(self._present) - 1)

    @override
    def collect(self, place: Place) -> list[Any]:
        return [call.given for call in self._present]

    @override
    def keep(self, place: Place, found: Sequence[Any]) -> None:
        if place.is_last:
            pairs = zip(self._present, tree_map_only(Tensor, Tensor.detach, list(found)), strict=True)
            self._calls[place.microbatch] = [replace(call, given=given) for call, given in pairs]

    @override
    def forget(self) -> None:
        self._calls.clear()

    def _taken(self, num_microbatches: int) -> list[Sequence[C]]:
        """The calls of each microbatch of the step, which are forgotten."""
        return [self._calls.pop(index) for index in range(num_microbatches)]
