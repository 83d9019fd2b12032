"""Hooks that only look at modules inside of a block: the forward calls them, its recomputation does not.

They are hooks of one module, or of all (``torch.nn.modules.module.register_module_forward_hook``). A hook that returns
something, changes a tensor that it gets in place, sets attributes of its module or draws random numbers has a part in
what the block computes, and is called again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lightning_3d.distributed.rng import Generators
from lightning_3d.errors import StepError
from lightning_3d.torch_internals.modules import BUFFERS, PARAMETERS, observer_registries
from lightning_3d.torch_internals.pytree import tree_leaves
from lightning_3d.torch_internals.tensors import version_of

Place = tuple[nn.Module | None, int, int]
"""Module, or None for all, index of the registry among its ``observer_registries`` and key in it."""
Hook = Callable[..., Any]


class ObservingHooks:
    """The hooks of one forward.

    Args:
        modules: Of the block.
    """

    def __init__(self, modules: Sequence[nn.Module], generators: Generators) -> None:
        self._modules, self._generators = modules, generators
        self._others: set[Place] = set()  # which do more than look
        self._has_ended = False

    @contextmanager
    def noted(self) -> Iterator[None]:
        """Find those called inside that only look."""
        with ExitStack() as replaced:
            for place in self._places():
                watch = partial(_watched, self._generators, partial(self._others.add, place))
                replaced.enter_context(_hook_replaced(*place, watch))
            yield
        self._has_ended = True

    @contextmanager
    def left_out(self, fqn: str) -> Iterator[None]:
        """Do not call those inside.

        Raises:
            StepError: one that has a part in what the block computes is gone.
        """
        if any(key not in observer_registries(owner)[i] for owner, i, key in self._others):
            raise StepError(
                f"{fqn} is computed again in its backward, but a hook that changed what its forward computed was"
                " removed since. Remove it after the backward, or leave the block out of activations.blocks."
            )
        with ExitStack() as replaced:
            for place in self._places() if self._has_ended else ():
                if place not in self._others:
                    replaced.enter_context(_hook_replaced(*place, lambda hook: _look_away))
            yield

    def _places(self) -> list[Place]:
        return [
            (owner, i, key)
            for owner in (None, *self._modules)
            for i, registry in enumerate(observer_registries(owner))
            for key, hook in registry.items()
            if not _is_of_torch(hook)
        ]


@contextmanager
def _hook_replaced(owner: nn.Module | None, i: int, key: int, replace: Callable[[Hook], Hook]) -> Iterator[None]:
    """Let another hook take the place of one, which may be removed inside."""
    registry = observer_registries(owner)[i]
    hook = registry[key]
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

    disabled: Hook = torch.compiler.disable(watched)  # in a block that its author compiled
    return disabled


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
