"""A parameter or buffer without data, until something uses it."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor, UntypedStorage, nn

from lightning_3d.model.deferred.replay import Contents, View, compute
from lightning_3d.torch_internals.pytree import tree_map_only
from lightning_3d.torch_internals.tensors import (
    IS_PARAMETER,
    count_as_parameter,
    make_wrapper_like,
    no_torch_function,
)
from lightning_3d.zero.attributes import users_attributes


class LazyStorage:
    """A storage whose contents are computed when they are first asked for."""

    def __init__(self, contents: Contents) -> None:
        self.contents = contents
        self.storage: UntypedStorage | None = None

    def get(self) -> UntypedStorage:
        """The storage, there for good from now on."""
        if self.storage is None:
            self.storage = compute(self.contents)
        return self.storage


class DeferredTensor(Tensor):
    """Any use but asking for its shape and the like computes its data and keeps it.

    Args:
        like: A strided tensor that has the shape, dtype and device.
        lazy: Its storage.
        is_parameter: Whether to count as an ``nn.Parameter``.
        requires_grad: Whether to collect gradients.
    """

    _lazy: LazyStorage
    _view: View

    @staticmethod
    def __new__(cls, like: Tensor, lazy: LazyStorage, *, is_parameter: bool, requires_grad: bool) -> DeferredTensor:
        deferred: DeferredTensor = make_wrapper_like(cls, like, dtype=like.dtype, requires_grad=requires_grad)
        return deferred

    def __init__(self, like: Tensor, lazy: LazyStorage, *, is_parameter: bool, requires_grad: bool) -> None:
        self._lazy, self._view = lazy, View.of(like)
        if is_parameter:
            count_as_parameter(self)

    __torch_function__ = no_torch_function  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch declares an instance method
        cls, func: Callable[..., Any], types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is torch.ops.aten.detach.default:  # `.data`, state_dict()
            return DeferredTensor(args[0], args[0]._lazy, is_parameter=False, requires_grad=False)
        args, kwargs = tree_map_only(DeferredTensor, DeferredTensor.materialised, (args, kwargs or {}))
        return func(*args, **kwargs)

    @property
    def contents(self) -> Contents | None:
        """The record of its data; None once it was used, and maybe changed."""
        return None if self._lazy.storage is not None else self._lazy.contents

    def materialised(self) -> Tensor:
        """A plain tensor on its data, which is computed if it is not there yet and then kept."""
        return self._view.on(self._lazy.get())

    def computed(self) -> Tensor:
        """A plain tensor with its data, which is not kept if it is not there yet."""
        contents = self.contents
        return self.materialised() if contents is None else self._view.on(compute(contents))

    def replace_data(self, data: Tensor) -> None:
        """Replace its data without computing it; ``data`` has the same shape."""
        contents = self.contents
        if contents is not None:
            self._lazy.storage = UntypedStorage(contents.num_bytes, device=contents.device)
        self.materialised().copy_(data)

    def plain(self) -> Tensor:
        """The parameter or tensor that it stands for, on the same data and with the same attributes."""
        data = self.materialised()
        plain = nn.Parameter(data, self.requires_grad) if isinstance(self, nn.Parameter) else data
        plain.__dict__.update(attributes(self))
        return plain

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        if id(self) not in memo:
            memo[id(self)] = copy.deepcopy(self.plain(), memo)
        copied: Tensor = memo[id(self)]
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.plain().__reduce_ex__(protocol)

    def __repr__(self) -> str:  # type: ignore[override]  # torch's has a private argument
        return f"DeferredTensor(shape={tuple(self.shape)}, dtype={self.dtype}, device='{self.device}')"


def has_deferred(module: nn.Module) -> bool:
    """Whether a module has parameters or buffers without data."""
    return any(isinstance(tensor, DeferredTensor) for tensor in chain(module.parameters(), module.buffers()))


def attributes(tensor: Tensor) -> dict[str, Any]:
    """The attributes that a user set on a tensor."""
    own = ("_lazy", "_view", IS_PARAMETER)
    return {name: value for name, value in users_attributes(tensor).items() if name not in own}
