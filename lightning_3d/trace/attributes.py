"""Attributes of a block's modules that glue may not read for a while, as they are right on the block's stage alone."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from torch import nn

from lightning_3d.errors import TraceError


def _subclass(cls: type[nn.Module], members: Mapping[str, object]) -> type[nn.Module]:
    """A class that looks like ``cls`` from outside."""
    looks = {"__module__": cls.__module__, "__qualname__": cls.__qualname__}
    found = type(cls.__name__, (nn.Module,), {**looks, **members})
    try:
        found.__bases__ = (cls,)  # neither its metaclass nor __init_subclass__, which may register classes, is called
    except TypeError:  # its instances have slots
        found = type(cls)(cls.__name__, (cls,), {**looks, **members})  # type: ignore[misc]  # the metaclass
    return found


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

    def __get__(self, module: nn.Module | None, cls: type[nn.Module]) -> object:
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

    def __set__(self, module: nn.Module, value: object) -> None:
        vars(module)[self._name] = value

    def __delete__(self, module: nn.Module) -> None:
        del vars(module)[self._name]
