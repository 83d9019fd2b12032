"""Lists of numbers in a batch, such as ids of samples, that note whether a step looks at their entries while it is
traced. What a step only passes on, or makes a tensor of, its trace does not depend on.
"""

from __future__ import annotations

from collections.abc import Callable
from numbers import Number
from typing import Any

import torch
from torch.overrides import TorchFunctionMode


class _Noting:
    """Calls ``looked_at`` when an entry is looked at in Python."""

    looked_at: Callable[[], None]


def _noting(name: str) -> Callable[..., Any]:
    def look(self: Any, *args: Any) -> Any:
        self.looked_at()
        return getattr(super(_Noting, self), name)(*args)

    return look


for _name in ("__iter__", "__getitem__", "__contains__", "__eq__", "__ne__", "__hash__", "__add__", "index", "count"):
    setattr(_Noting, _name, _noting(_name))


class TracedList(_Noting, list[Any]):
    """A list that tells when an entry is looked at."""

    def __reversed__(self) -> Any:
        self.looked_at()
        return super().__reversed__()


class TracedTuple(_Noting, tuple[Any, ...]):
    """A tuple that tells when an entry is looked at."""


def has_numbers(values: Any) -> bool:
    """Whether it is a list or tuple of numbers alone."""
    return type(values) in (list, tuple) and len(values) > 0 and all(isinstance(value, Number) for value in values)


class Looks(TorchFunctionMode):
    """Notes the lists of which a step looks at entries inside, otherwise than to make tensors of them."""

    def __init__(self) -> None:
        super().__init__()
        self.paths: set[str] = set()
        self._is_making_tensor = False

    def traced(self, path: str, values: Any) -> Any:
        """The same list or tuple, whose path is noted when an entry is looked at."""
        noting = TracedList(values) if isinstance(values, list) else TracedTuple(values)
        noting.looked_at = lambda: None if self._is_making_tensor else self.paths.add(path)
        return noting

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        self._is_making_tensor = func in (torch.tensor, torch.as_tensor)
        try:
            return func(*args, **(kwargs or {}))
        finally:
            self._is_making_tensor = False
