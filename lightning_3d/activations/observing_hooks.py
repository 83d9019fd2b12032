"""Hooks that only look at modules inside of a block: the forward calls them, its recomputation does not.

They are hooks of one module, or of all (``torch.nn.modules.module.register_module_forward_hook``). A hook that returns
something, changes a tensor that it gets in place, sets attributes of its module or draws random numbers has a part in
what the block computes, and is called again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

from torch import Tensor, nn

from lightning_3d.distributed.rng import Generators
from lightning_3d.torch_internals.modules import BUFFERS, PARAMETERS, observer_registries
from lightning_3d.torch_internals.pytree import tree_leaves
from lightning_3d.torch_internals.tensors import version_of

Observers = list[tuple[nn.Module | None, int, int]]
"""Module, or None for all, index of the registry among its ``observer_registries`` and key in it."""


@contextmanager
def observers_noted(modules: Iterable[nn.Module], generators: Generators) -> Iterator[Observers]:
    """Find the hooks called inside that only look.

    Yields:
        A list of them, filled at the end.
    """
    observers: Observers = []
    called = [
        (owner, i, key)
        for owner in (None, *modules)
        for i, registry in enumerate(observer_registries(owner))
        for key, hook in registry.items()
        if not _is_of_torch(hook)
    ]
    others: set[tuple[nn.Module | None, int, int]] = set()
    with ExitStack() as replaced:
        for place in called:
            watch = partial(_watched, generators, partial(others.add, place))
            replaced.enter_context(_hook_replaced(*place, watch))
        yield observers
    observers += [place for place in called if place not in others]


@contextmanager
def without_observers(observers: Observers) -> Iterator[None]:
    """Do not call these hooks inside."""
    with ExitStack() as replaced:
        for place in observers:
            replaced.enter_context(_hook_replaced(*place, lambda hook: _look_away))
        yield


Hook = Callable[..., Any]


@contextmanager
def _hook_replaced(owner: nn.Module | None, i: int, key: int, replace: Callable[[Hook], Hook]) -> Iterator[None]:
    """Let another hook take the place of one, which may be removed inside or before."""
    registry = observer_registries(owner)[i]
    if (hook := registry.get(key)) is None:
        yield
        return
    registry[key] = replacement = replace(hook)
    try:
        yield
    finally:
        if registry.get(key) is replacement:
            registry[key] = hook


def _watched(generators: Generators, takes_part: Callable[[], None], hook: Hook) -> Hook:
    def watched(module: nn.Module, *args: Any) -> Any:
        attributes, states, versions = _attributes(module), generators.states(), _versions(args)
        answer = hook(module, *args)
        is_looking = answer is None and _attributes(module) == attributes and _versions(args) == versions
        if not is_looking or not generators.are_at(states):
            takes_part()
        return answer

    return watched


def _look_away(*args: Any) -> None:
    """In place of a hook."""


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


def _versions(args: tuple[Any, ...]) -> list[int]:
    """How often each tensor that a hook gets was changed in place, and those behind tensors of subclasses."""
    tensors = [leaf for leaf in tree_leaves(args) if isinstance(leaf, Tensor)]
    tensors += [held for leaf in tensors for held in vars(leaf).values() if isinstance(held, Tensor)]
    return [version_of(tensor) for tensor in tensors if not tensor.is_inference()]
