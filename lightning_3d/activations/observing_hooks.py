"""Hooks that only look at modules inside of a block: the forward calls them, its recomputation does not.

They are hooks of one module, or of all (``torch.nn.modules.module.register_module_forward_hook``). A hook that returns
something, changes a tensor that it gets in place, sets attributes of its module or draws random numbers has a part in
what the block computes, and is called again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager

import torch
from torch import Tensor, nn

from lightning_3d.distributed.rng import Generators
from lightning_3d.errors import StepError
from lightning_3d.torch_internals.modules import BUFFERS, PARAMETERS, observer_registries
from lightning_3d.torch_internals.pytree import tree_leaves
from lightning_3d.torch_internals.tensors import version_of

Hook = Callable[..., object]
Place = tuple[int, int]
"""Index of a registry, and the key of a hook in it."""


class ObservingHooks:
    """The hooks of one forward.

    Args:
        modules: Of the block.
    """

    def __init__(self, modules: Sequence[nn.Module], generators: Generators) -> None:
        self._modules, self._generators = modules, generators
        self._others: set[Place] = set()  # which do more than look

    @property
    def _registries(self) -> list[dict[int, Hook]]:
        """As they are now: a pipeline has others in their places for the time of a microbatch."""
        return [registry for owner in (None, *self._modules) for registry in observer_registries(owner)]

    def noted(self) -> AbstractContextManager[None]:
        """Find those called inside that only look."""
        return self._replaced(self._watched)

    def left_out(self, fqn: str) -> AbstractContextManager[None]:
        """Do not call those inside.

        Raises:
            StepError: one that has a part in what the block computes is gone.
        """
        registries = self._registries
        if any(key not in registries[i] for i, key in self._others):
            raise StepError(
                f"{fqn} is computed again in its backward, but a hook that changed what its forward computed was"
                " removed since. Remove it after the backward, or leave the block out of activations.blocks."
            )
        return self._replaced(lambda hook, place: hook if place in self._others else _look_away)

    @contextmanager
    def _replaced(self, replace: Callable[[Hook, Place], Hook]) -> Iterator[None]:
        """Let others take the places of the user's hooks, which may be removed inside."""
        pairs = [
            (registry, key, hook, replace(hook, (i, key)))
            for i, registry in enumerate(self._registries)
            for key, hook in registry.items()
            if not _is_of_torch(hook)
        ]
        for registry, key, _, replacement in pairs:
            registry[key] = replacement
        try:
            yield
        finally:
            for registry, key, hook, replacement in pairs:
                if registry.get(key) is replacement:
                    registry[key] = hook

    def _watched(self, hook: Hook, place: Place) -> Hook:
        def watched(module: nn.Module, *args: object) -> object:
            before, drawn_from = _state(module, args), self._generators.states()
            answer = hook(module, *args)
            if answer is not None or _state(module, args) != before or not self._generators.are_at(drawn_from):
                self._others.add(place)
            return answer

        disabled: Hook = torch.compiler.disable(watched)  # in a block that its author compiled
        return disabled


def _look_away(*args: object) -> None:
    """In place of a hook."""


def _is_of_torch(hook: object) -> bool:
    """Whether it is one of those with which torch's own modules compute: weight norms, parallel modules."""
    return str(getattr(hook, "__module__", "")).partition(".")[0] == "torch"


def _state(module: nn.Module, args: tuple[object, ...]) -> tuple[dict[str, int], list[int]]:
    """The identity of each attribute, parameter and buffer, and how often each tensor that a hook gets, or the one
    behind it, was changed in place.
    """
    attributes = vars(module)
    owners = (attributes, attributes[PARAMETERS], attributes[BUFFERS])
    tensors = [leaf for leaf in tree_leaves(args) if isinstance(leaf, Tensor)]
    tensors += [held for leaf in tensors for held in vars(leaf).values() if isinstance(held, Tensor)]
    versions = [version_of(tensor) for tensor in tensors if not tensor.is_inference()]
    return {name: id(value) for owner in owners for name, value in owner.items()}, versions
