"""Random generators that modules hold themselves (``self.generator = torch.Generator()``).

Every stage runs the step for every microbatch, but leaves it early, so their generators would not stay in step. So each
microbatch starts from numbers that follow from where a generator was before the step, the same on all stages.
"""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import nn
from typing_extensions import override

from lightning_3d.distributed.generator_states import generators_of, state_of, states_kept
from lightning_3d.pipeline.effects.effect import Effect, Place


class OwnGenerators(Effect):
    """The generators among the attributes of a module and its submodules."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._starts: list[tuple[Any, int]] = []  # where generators were before the step

    @override
    @contextmanager
    def begin(self, number: int) -> Iterator[None]:
        generators = generators_of(self._module.modules())
        self._starts = [(generator, _digest(state_of(generator))) for generator in generators]
        with states_kept(generators):
            yield

    @override
    @contextmanager
    def microbatch(self, place: Place) -> Iterator[None]:
        for position, (generator, start) in enumerate(self._starts):
            is_alike = place.also_whole and not isinstance(generator, torch.Generator)
            _seed(generator, _digest((position if place.is_trace else start, 0 if is_alike else place.microbatch)))
        yield

    @override
    def apply(self, joined: Any, *, is_own: bool) -> None:
        while self._starts:  # once for all stages that report
            generator, start = self._starts.pop()
            _seed(generator, _digest(start))


def _digest(value: Any) -> int:
    """A seed that follows from a value, the same in all processes."""
    data = value.numpy().tobytes() if isinstance(value, torch.Tensor) else pickle.dumps(value)
    return int.from_bytes(hashlib.blake2b(data, digest_size=4).digest())


def _seed(generator: Any, seed: int) -> None:
    if isinstance(generator, torch.Generator):
        generator.manual_seed(seed)
    elif isinstance(generator, np.random.Generator):
        generator.bit_generator.state = type(generator.bit_generator)(seed).state
    else:
        generator.seed(seed)
