"""Values that a block's Python code reads and that are compiled in: a call with others is a call of another kind.

attributes          of its modules, and what objects, lists and dicts in them hold
class attributes    of its modules and of these objects
outside             globals and enclosing variables that methods of its modules read, and functions these call
"""

from __future__ import annotations

import argparse
import sys
import sysconfig
import types
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Mapping
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor, nn

from lightning_3d.torch_internals.capture import NotCompilable

STATIC_TYPES = (bool, int, float, complex, str, bytes, type(None), type(...), torch.dtype, torch.device, torch.layout)
"""Types of values that compare by what they are."""

_MOST_BYTES = 2**16
"""The largest NumPy array whose content is compared."""

_INSTALLED = (sysconfig.get_path("purelib"), sysconfig.get_path("platlib"))
"""Where packages lie, whose globals count as constants."""

_NAMESPACES = (types.SimpleNamespace, argparse.Namespace)

_Reference = Callable[[], Any]

_REFERENCES: WeakKeyDictionary[type, tuple[_Reference, ...]] = WeakKeyDictionary()
"""By class: reads what its methods may read from outside."""


class _Same:
    """Compares an object by identity."""

    __slots__ = ("value",)

    def __init__(self, value: object) -> None:
        self.value = value

    def __hash__(self) -> int:
        return id(self.value)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self.value is other.value


class Values:
    """Reads the values of one call of a block.

    Args:
        modules: All modules of the block.
    """

    def __init__(self, modules: list[nn.Module]) -> None:
        self._modules = set(map(id, modules))
        self._seen: set[int] = set()
        self._is_outside = False  # what is read was found by a name outside of the block

    def of_class(self, cls: type) -> Hashable:
        """The class, with what its attributes and its methods' globals are."""
        if not self._is_new(cls):
            return cls
        content: list[Hashable] = []
        for each in cls.__mro__:
            if _is_users(each) and (each is cls or self._is_new(each)):
                names = [(name, value) for name, value in vars(each).items() if not name.startswith("__")]
                content += [(name, self.of(value)) for name, value in names if _is_value(value)]
                content += [self._of_outside(refer()) for refer in _references(each)]
        return cls, tuple(content)

    def of(self, value: object) -> Hashable:
        """A value of an attribute: by what it is, with the content of containers and of objects such as a config.

        Raises:
            NotCompilable: its content may change, and is too much to compare.
        """
        if type(value) in STATIC_TYPES or isinstance(value, np.generic):
            return type(value), value
        if isinstance(value, type):
            return self._of_type(value)
        if isinstance(value, nn.Module):
            return self._of_module(value)
        if isinstance(value, Tensor) or not self._is_new(value):
            return _Same(value)
        if isinstance(value, list | tuple | set | frozenset | deque):
            return type(value), tuple([self.of(item) for item in value])
        if isinstance(value, dict):
            return type(value), tuple([(_Same(key), self.of(item)) for key, item in value.items()])
        if isinstance(value, np.ndarray):
            return self._of_array(value)
        content = _content(value)
        if not _is_deep(type(value)):
            return _Same(value), tuple([(name, type(v), v) for name, v in content.items() if type(v) in STATIC_TYPES])
        return _Same(value), self.of_class(type(value)), tuple([(name, self.of(v)) for name, v in content.items()])

    def _of_outside(self, value: object) -> Hashable:
        before, self._is_outside = self._is_outside, True
        try:
            return self.of(value)
        finally:
            self._is_outside = before

    def _is_new(self, value: object) -> bool:
        is_new = id(value) not in self._seen
        self._seen.add(id(value))
        return is_new

    def _of_type(self, cls: type) -> Hashable:
        if not _is_users(cls) or not self._is_new(cls):
            return cls
        names = [(name, value) for name, value in vars(cls).items() if not name.startswith("__")]
        return cls, tuple([(name, self.of(value)) for name, value in names if _is_value(value)])

    def _of_module(self, module: nn.Module) -> Hashable:
        if self._is_outside:  # such as a table of activation functions
            return _Same(module), tuple(
                [(name, type(v), v) for name, v in vars(module).items() if type(v) in STATIC_TYPES]
            )
        if id(module) not in self._modules:
            raise NotCompilable(f"it refers to a {type(module).__name__}, whose attributes could change, outside of it")
        return _Same(module)

    def _of_array(self, array: np.ndarray[Any, Any]) -> Hashable:
        if array.dtype.hasobject or array.nbytes > _MOST_BYTES:
            raise NotCompilable("it refers to a NumPy array, whose content could change; a buffer would do")
        return type(array), array.shape, array.dtype.str, array.tobytes()


def _is_users(cls: type) -> bool:
    return not _is_library(cls.__module__)


def _is_deep(cls: type) -> bool:
    """Whether objects of a class may hold others that the block reads."""
    return _is_users(cls) or cls in _NAMESPACES


def _is_value(value: object) -> bool:
    """Whether it may be read as it is, rather than be called."""
    if type(value) in STATIC_TYPES or isinstance(value, list | tuple | set | frozenset | deque | dict):
        return True
    return isinstance(value, np.ndarray | np.generic | nn.Module) or (
        not isinstance(value, type | types.FunctionType | types.ModuleType | property) and _is_deep(type(value))
    )


def _content(value: object) -> Mapping[str, Any]:
    """The attributes of an object, also of one without a ``__dict__``."""
    content = dict(getattr(value, "__dict__", {}))
    for cls in type(value).__mro__:
        slots = vars(cls).get("__slots__", ()) if _is_users(cls) else ()
        for name in (slots,) if isinstance(slots, str) else slots:
            if name not in content and hasattr(value, name):
                content[name] = getattr(value, name)
    return content


def _references(cls: type) -> tuple[_Reference, ...]:
    if cls not in _REFERENCES:
        functions = [_function_of(value) for name, value in vars(cls).items() if name != "__init__"]
        seen: set[types.CodeType] = set()
        _REFERENCES[cls] = tuple([refer for f in functions if f is not None for refer in _read_by(f, seen)])
    return _REFERENCES[cls]


def _function_of(member: object) -> types.FunctionType | None:
    if isinstance(member, property):
        member = member.fget
    if isinstance(member, staticmethod | classmethod):
        member = member.__func__
    return member if isinstance(member, types.FunctionType) else None


def _read_by(function: types.FunctionType, seen: set[types.CodeType]) -> Iterator[_Reference]:
    """The values outside of a function that it may read, and those that functions outside read which it may call."""
    if function.__code__ in seen or function.__code__.co_filename.startswith(_INSTALLED):
        return
    seen.add(function.__code__)
    names = _names(function.__code__)
    found: list[_Reference] = [partial(function.__globals__.get, name) for name in sorted(names)]
    found += [partial(_held, cell) for cell in function.__closure__ or ()]
    for refer in found:
        value = refer()
        if isinstance(value, types.FunctionType) and not _is_library(value.__module__):
            yield from _read_by(value, seen)
        elif isinstance(value, types.ModuleType) and not _is_library(value.__name__):
            yield from [partial(vars(value).get, name) for name in sorted(names) if _is_value(vars(value).get(name))]
        elif (isinstance(value, type) and _is_users(value)) or _is_value(value):
            yield refer


def _is_library(module: str | None) -> bool:
    top = str(module).partition(".")[0]
    return top in ("torch", "lightning_3d", "numpy") or top in sys.stdlib_module_names


def _held(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # it is empty yet
        return None


def _names(code: types.CodeType) -> set[str]:
    inner = [_names(constant) for constant in code.co_consts if isinstance(constant, types.CodeType)]
    return set(code.co_names).union(*inner)
