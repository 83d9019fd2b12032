"""Attributes of a block's modules that are watched for a while: those its code reads, and those that glue may not read.

Blocks that differ in an attribute that their code reads may compute different things. A number that is the block's own
place among its siblings, as ``layer_idx``, counts as equal for all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from types import BuiltinFunctionType, FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from lightning_3d.errors import TraceError
from lightning_3d.torch_internals.modules import TORCH_ATTRIBUTES
from lightning_3d.trace.ghost import TensorMeta

_BY_VALUE = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)
_BY_IDENTITY = (type, FunctionType, BuiltinFunctionType)


@dataclass(frozen=True, eq=False)
class Read:
    """The value of an attribute when it was first read; equal for values that planning need not tell apart."""

    key: Hashable
    is_place: bool
    """Whether it is the number of the block among its siblings."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Read) and (self.key == other.key or (self.is_place and other.is_place))

    def __hash__(self) -> int:
        return hash(Read)


class AttributeReads:
    """Watches the modules of a block by giving each a subclass of its class for a while."""

    def __init__(self) -> None:
        self._watched: dict[type[nn.Module], type[nn.Module]] = {}
        self._names: dict[int, str] = {}  # id of a module -> its name in the block
        self._found: dict[str, Read] = {}
        self._places: set[int] = set()

    @contextmanager
    def noted(self, fqn: str, block: nn.Module, found: dict[str, Read]) -> Iterator[None]:
        """Note what is read inside.

        Args:
            found: Name in the block -> its value; gets what is not in it yet.
        """
        self._found, self._names = found, {id(module): name for name, module in block.named_modules()}
        self._places = {int(part) for part in fqn.split(".") if part.isdecimal()}
        own = [(module, type(module)) for module in block.modules()]
        try:
            for module, cls in own:
                module.__class__ = self._watching(cls)
            yield
        finally:
            for module, cls in own:
                module.__class__ = cls

    def _watching(self, cls: type[nn.Module]) -> type[nn.Module]:
        if cls not in self._watched:

            def read(module: nn.Module, name: str) -> Any:
                value = cls.__getattribute__(module, name)
                if name not in TORCH_ATTRIBUTES and name in object.__getattribute__(module, "__dict__"):
                    self._note(f"{self._names.get(id(module), '')}.{name}", value)
                return value

            self._watched[cls] = _subclass(cls, {"__getattribute__": read})
        return self._watched[cls]

    def _note(self, name: str, value: Any) -> None:
        if name not in self._found:
            self._found[name] = Read(_key(value), is_place=type(value) is int and value in self._places)


def _subclass(cls: type[nn.Module], members: Mapping[str, Any]) -> type[nn.Module]:
    """A class that looks like ``cls`` from outside."""
    looks = {"__module__": cls.__module__, "__qualname__": cls.__qualname__}
    found = type(cls.__name__, (nn.Module,), {**looks, **members})
    try:
        found.__bases__ = (cls,)  # neither its metaclass nor __init_subclass__, which may register classes, is called
    except TypeError:  # its instances have slots
        found = type(cls)(cls.__name__, (cls,), {**looks, **members})  # type: ignore[misc]  # the metaclass
    return found


def _key(value: Any) -> Hashable:
    """Equal for values that compute the same, as far as planning can tell."""
    if isinstance(value, _BY_VALUE):
        return type(value), value
    if isinstance(value, _BY_IDENTITY):
        return value
    if isinstance(value, Tensor):
        return TensorMeta.of(value)
    if isinstance(value, partial):
        return _key(value.func), _key(value.args), _key(value.keywords)
    if isinstance(value, (list, tuple)):
        return type(value), tuple(map(_key, value))
    if isinstance(value, dict):
        return type(value), tuple((str(key), _key(entry)) for key, entry in value.items())
    content = getattr(value, "__dict__", {})  # a config
    return type(value), tuple((name, entry) for name, entry in content.items() if isinstance(entry, _BY_VALUE))


class AttributeGuards:
    """Guards attributes of modules by giving each module a subclass of its class until ``remove``.

    Args:
        is_glue: Whether the present code is glue of a running step.
    """

    def __init__(self, is_glue: Callable[[], bool]) -> None:
        self._is_glue = is_glue
        self._own: dict[nn.Module, type[nn.Module]] = {}
        self._guards: dict[nn.Module, dict[str, _Guard]] = {}

    def add(self, fqn: str, block: nn.Module, names: Iterable[str]) -> None:
        """Guard attributes of a block, by their names in it."""
        for name in sorted(names):
            path, _, attribute = name.rpartition(".")
            module = block.get_submodule(path)
            cls = self._own.setdefault(module, type(module))
            guards = self._guards.setdefault(module, {})
            if attribute not in guards:
                guards[attribute] = _Guard(fqn, attribute, self._is_glue)
                module.__class__ = _subclass(cls, guards)

    def remove(self) -> None:
        """Give every module its own class back."""
        for module, cls in self._own.items():
            module.__class__ = cls
        self._own, self._guards = {}, {}


class _Guard:
    """A descriptor in place of an attribute."""

    def __init__(self, fqn: str, name: str, is_glue: Callable[[], bool]) -> None:
        self._fqn, self._name, self._is_glue = fqn, name, is_glue

    def __get__(self, module: nn.Module | None, cls: type[nn.Module]) -> Any:
        if module is None:
            return self
        if self._is_glue():
            raise TraceError(
                f"{cls.__name__}.{self._name} was read outside of the block {self._fqn}, whose forward changes it, but"
                " the block lives on another pipeline stage. Return the value from the block's forward. (Tensors that"
                " forward sets as attributes do reach later stages; numbers and changes of lists and dicts don't.)"
            )
        if self._name in vars(module):
            return vars(module)[self._name]
        return getattr(super(type(module), module), self._name)  # an attribute of the class

    def __set__(self, module: nn.Module, value: Any) -> None:
        vars(module)[self._name] = value

    def __delete__(self, module: nn.Module) -> None:
        del vars(module)[self._name]
