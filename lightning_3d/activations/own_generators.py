"""Generators of random numbers in attributes of a block, for the recomputation of a forward that draws from them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from torch import nn

from lightning_3d.distributed.generator_states import generators_of, set_state, state_of


class OwnGenerators:
    """The states of the generators of Python, NumPy and torch among the attributes of some modules."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._states = [(generator, state_of(generator)) for generator in generators_of(modules)]

    @contextmanager
    def back(self) -> Iterator[None]:
        """Have them there inside, and where they are now afterwards."""
        now = [(generator, state_of(generator)) for generator, _ in self._states]
        try:
            for generator, state in self._states:
                set_state(generator, state)
            yield
        finally:
            for generator, state in now:
                set_state(generator, state)
