"""Optimizer states at home in a store."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_3d.errors import OffloadError
from lightning_3d.torch_internals.pytree import tree_flatten, tree_unflatten
from lightning_3d.zero.offload.store import Store

_Key = tuple[str, int]
"""Name of a state, and the index of a leaf in it where it is a container."""


class OffloadedStates:
    """Between steps the state of a parameter is keyed by the module's parameter, and its tensors lie in the store."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._homes: dict[nn.Parameter, dict[_Key, Tensor]] = {}

    def to_host(self, optimizer: Optimizer, parameter: nn.Parameter) -> None:
        """Move what was made or set elsewhere into the store, if the parameter has a state."""
        state = optimizer.state.get(parameter, {})
        for name, value in state.items():
            leaves, spec = tree_flatten(value)
            moved = [self._moved(optimizer, parameter, (name, index), leaf) for index, leaf in enumerate(leaves)]
            state[name] = tree_unflatten(moved, spec)

    def _moved(self, optimizer: Optimizer, parameter: nn.Parameter, key: _Key, value: object) -> object:
        if not isinstance(value, Tensor):
            return value
        homes = self._homes.setdefault(parameter, {})
        if self._store.holds(value):
            homes[key] = value
            return value
        if type(value) not in (Tensor, nn.Parameter):
            raise OffloadError(
                f"state {key[0]!r} of {type(optimizer).__name__} is a {type(value).__name__}: only plain tensors"
                " can be offloaded. Use another optimizer, or zero.offload_optimizer='none'."
            )
        home = homes.get(key)
        if home is None or home.shape != value.shape or home.dtype != value.dtype:
            home = homes[key] = self._store.zeros(value.shape, value.dtype)
        home.copy_(value)
        return home

    def of(self, parameter: nn.Parameter) -> Iterable[Tensor]:
        """The memory of a parameter's state in the store."""
        return self._homes.get(parameter, {}).values()
