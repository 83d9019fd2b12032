"""Hooks of modules inside of a block that only look: the forward calls them, its recomputation does not.

A hook that returns something, sets attributes of its module or draws random numbers has a part in what the block
computes, and is called again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

from torch import nn

from lightning_3d.distributed.rng import Generators
from lightning_3d.torch_internals.modules import (
    BUFFERS,
    PARAMETERS,
    hook_registries_copied,
    observer_registries,
)

Observers = list[tuple[nn.Module, int, int]]
"""Module, index of the registry among its ``observer_registries`` and key in it."""


@contextmanager
def observers_noted(modules: Iterable[nn.Module], generators: Generators) -> Iterator[Observers]:
    """Find the hooks called inside that only look.

    Yields:
        A list of them, filled at the end.
    """
    observers: Observers = []
    called: Observers = []
    others: set[tuple[nn.Module, int, int]] = set()
    with ExitStack() as copies:
        for module in modules:
            for i, registry in enumerate(observer_registries(module)):
                keys = [key for key, hook in registry.items() if not _is_of_torch(hook)]
                if keys:
                    copies.enter_context(hook_registries_copied(module))
                    for key in keys:
                        place = module, i, key
                        present = observer_registries(module)[i]
                        present[key] = _watched(present[key], generators, partial(others.add, place))
                        called.append(place)
        yield observers
    observers += [place for place in called if place not in others]


@contextmanager
def without_observers(observers: Observers) -> Iterator[None]:
    """Do not call these hooks inside."""
    with ExitStack() as copies:
        for module in dict.fromkeys(module for module, _, _ in observers):
            copies.enter_context(hook_registries_copied(module))
        for module, i, key in observers:
            observer_registries(module)[i].pop(key, None)
        yield


def _watched(hook: Callable[..., Any], generators: Generators, takes_part: Callable[[], None]) -> Callable[..., Any]:
    def watched(module: nn.Module, *args: Any) -> Any:
        attributes, states = _attributes(module), generators.states()
        answer = hook(module, *args)
        if answer is not None or _attributes(module) != attributes or not generators.are_at(states):
            takes_part()
        return answer

    return watched


def _is_of_torch(hook: object) -> bool:
    """Whether it is one of those with which torch's own modules compute: weight norms, parallel modules."""
    return str(getattr(hook, "__module__", "")).partition(".")[0] == "torch"


def _attributes(module: nn.Module) -> dict[str, int]:
    """Name -> identity of each attribute, parameter and buffer."""
    attributes = vars(module)
    return {
        name: id(value)
        for owner in (attributes, attributes[PARAMETERS], attributes[BUFFERS])
        for name, value in owner.items()
    }
