"""Optimizer states at home in a store: lent to the pieces of parameters that are stepped, and taken back."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_3d.errors import OffloadError
from lightning_3d.torch_internals.pytree import tree_flatten, tree_unflatten
from lightning_3d.zero.offload.store import Store
from lightning_3d.zero.offload.windows import Piece

_Key = tuple[str, int]
"""Name of a state, and the index of a leaf in it where it is a container."""


class OffloadedStates:
    """Between steps the state of a parameter is keyed by the module's parameter, and its tensors lie in the store.

    A piece of some rows is lent those rows of the tensors that are like the parameter, and copies of the others (step
    counts), which count once the last piece has been stepped.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._homes: dict[nn.Parameter, dict[_Key, Tensor]] = {}

    def lend(self, optimizer: Optimizer, piece: Piece, stepped: nn.Parameter) -> None:
        """Give a piece its state, if there is one."""
        parameter, shape = piece.part.parameter, piece.part.values.shape
        if parameter not in optimizer.state:
            return
        if piece.rows is None or piece.rows.start == 0:
            self.bring_home(optimizer, parameter)
        if piece.rows is None:
            optimizer.state[stepped] = optimizer.state.pop(parameter)
            return

        def lent(_: _Key, value: Any) -> Any:
            if not isinstance(value, Tensor):
                return value
            return piece.of(value) if value.shape == shape else value.clone()

        optimizer.state[stepped] = _changed(optimizer.state[parameter], lent)

    def take_back(self, optimizer: Optimizer, piece: Piece, stepped: nn.Parameter) -> None:
        """Take a piece's state after its step, or what a failed step has left of it."""
        if stepped not in optimizer.state:
            return
        parameter, state = piece.part.parameter, optimizer.state.pop(stepped)
        if piece.rows is None:
            optimizer.state[parameter] = state
            self.bring_home(optimizer, parameter)
            return

        def taken(key: _Key, value: Any) -> Any:
            if not isinstance(value, Tensor) or value.shape != stepped.shape:
                return value
            home = self._home(parameter, key, piece.part.values.shape, value.dtype)
            rows = piece.of(home)
            if rows.data_ptr() != value.data_ptr():
                rows.copy_(value)
            return home

        state = _changed(state, taken)
        if piece.is_last:
            optimizer.state.setdefault(parameter, {}).update(state)

    def bring_home(self, optimizer: Optimizer, parameter: nn.Parameter) -> None:
        """Move what was made or set elsewhere into the store."""

        def moved(key: _Key, value: Any) -> Any:
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
            home = self._home(parameter, key, value.shape, value.dtype)
            home.copy_(value)
            return home

        state = optimizer.state[parameter]
        state.update(_changed(state, moved))

    def _home(self, parameter: nn.Parameter, key: _Key, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        homes = self._homes.setdefault(parameter, {})
        home = homes.get(key)
        if home is None or home.shape != shape or home.dtype != dtype:
            home = homes[key] = self._store.zeros(shape, dtype)
        return home

    def of(self, piece: Piece) -> Iterator[Tensor]:
        """The memory of a piece's state in the store."""
        for home in self._homes.get(piece.part.parameter, {}).values():
            yield piece.of(home) if home.shape == piece.part.values.shape else home


def _changed(state: dict[str, Any], change: Callable[[_Key, Any], Any]) -> dict[str, Any]:
    changed = {}
    for name, value in state.items():
        leaves, spec = tree_flatten(value)
        changed[name] = tree_unflatten([change((name, index), leaf) for index, leaf in enumerate(leaves)], spec)
    return changed
