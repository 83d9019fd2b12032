"""Random numbers of a step: every microbatch starts with its own, and the process goes on from where it was."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

from typing_extensions import override

from lightning_3d.distributed.rng import StepRandomness
from lightning_3d.pipeline.effects.effect import Effect, Place


class RandomNumbers(Effect):
    """The default generators.

    Args:
        randomness: Seeds.
    """

    def __init__(self, randomness: StepRandomness) -> None:
        self._randomness = randomness
        self._number = 0

    @override
    def begin(self, number: int) -> AbstractContextManager[None]:
        self._number = number
        return self._randomness.step()

    @override
    @contextmanager
    def microbatch(self, place: Place) -> Iterator[None]:
        self._randomness.seed_glue(self._number, place.microbatch)
        yield
