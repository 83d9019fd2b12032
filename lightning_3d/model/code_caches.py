"""Tensors that a model's code keeps outside of its modules: in ``functools.lru_cache``, class attributes and globals.

Planning runs that code on tensors without data, or on random ones. What it keeps of those (grids of anchors, masks,
tables of positions) would be taken for real in training. Only what holds tensors is put back: lazily made registries
and counters stay as they are.
"""

from __future__ import annotations

import functools
import gc
import sys
import weakref
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from types import CellType, FunctionType, ModuleType
from typing import Any

from torch import Tensor, nn

from lightning_3d.model.containers import CONTAINERS, content_of, is_filled_with, refill

_LruCache = type(functools.lru_cache(lambda: None))

_FRAMEWORKS = frozenset({"torch", "lightning", "lightning_3d", *sys.stdlib_module_names}) - {"__main__"}
"""Top-level packages whose code keeps no tensors of a model."""

_MOST_ENTRIES = 10_000
"""Entries of a container up to which it is looked into: more are data."""
_DEPTH = 4
"""Containers in containers that are looked into."""

_ABSENT = object()


class CodeCaches:
    """The places outside of modules in which their code may keep tensors.

    Args:
        modules: Their classes, and the Python modules that define these, are looked into.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        classes = {cls for kind in {type(module) for module in modules} for cls in kind.__mro__ if _is_users(cls)}
        files = {name: sys.modules[name] for cls in classes if (name := cls.__module__) in sys.modules}
        for name, file in files.items():  # and classes beside them
            classes |= {cls for cls in vars(file).values() if isinstance(cls, type) and cls.__module__ == name}
        self._owners: list[type | ModuleType] = [*classes, *files.values()]
        values = [getattr(value, "__func__", value) for owner in self._owners for value in vars(owner).values()]
        self._lru_caches = {value for value in values if type(value) is _LruCache}  # gc.freeze() hides them

    @contextmanager
    def put_back(self) -> Iterator[None]:
        """Let tensors that come into caches inside be gone from them afterwards."""
        misses = [(cache, cache.cache_info().misses) for cache in self._lru_caches.union(_LRU_CACHES.of_users())]
        attributes = [(owner, dict(vars(owner))) for owner in self._owners]
        containers = {id(c): c for _, names in attributes for c in _containers(names)}.values()
        contents = [(container, content_of(container) if container else {}) for container in containers]
        try:
            yield
        finally:
            for cache, before in misses:
                if cache.cache_info().misses != before and any(map(_holds_tensor, gc.get_referents(cache))):
                    cache.cache_clear()
            for owner, names in attributes:
                _put_back(owner, names)
            for container, content in contents:
                is_changed = not is_filled_with(container, content) if content else bool(container)
                if is_changed and _holds_tensor(container):
                    refill(container, content)


class _LruCaches:
    """All ``functools.lru_cache`` objects, which nothing lists but the garbage collector, in 0.1 s."""

    def __init__(self) -> None:
        self._found: list[weakref.ref[object]] = []
        self._num_referrers = -1

    def of_users(self) -> list[Any]:
        """The caches around functions of users and of their packages."""
        caches = [cache for reference in self._found if (cache := reference()) is not None]
        number = sys.getrefcount(_LruCache)  # every object refers to its class
        if number != self._num_referrers or len(caches) < len(self._found):
            every = [cache for cache in gc.get_objects() if type(cache) is _LruCache]
            caches = [cache for cache in every if _is_users(cache)]
            self._found, self._num_referrers = [weakref.ref(cache) for cache in caches], number
        return caches


_LRU_CACHES = _LruCaches()


def _is_users(code: object) -> bool:
    """Whether a class or function is of the model's author, or of a package that is no framework."""
    return not _is_of_framework(str(getattr(code, "__module__", None)))


@functools.cache
def _is_of_framework(module: str) -> bool:
    return module.partition(".")[0] in _FRAMEWORKS


def _put_back(owner: type | ModuleType, before: Mapping[str, object]) -> None:
    changed = {name for name, value in dict(vars(owner)).items() if before.get(name, _ABSENT) is not value}
    for name in changed:
        if _holds_tensor(vars(owner)[name]):
            delattr(owner, name) if name not in before else setattr(owner, name, before[name])


def _containers(names: Mapping[str, object]) -> list[Any]:
    """The containers among attributes, also those inside of dicts, of objects, and in the closures of functions."""
    found: list[object] = []
    for value in names.values():
        if isinstance(value, FunctionType):
            found.append(vars(value))
            found += map(_content_of_cell, value.__closure__ or ())
        elif isinstance(value, dict):
            found += (value, *dict.values(value))
        elif isinstance(value, CONTAINERS):
            found.append(value)
        elif _is_users(type(value)) and not isinstance(value, (type, ModuleType, Tensor, nn.Module)):
            attributes = getattr(value, "__dict__", {})
            found += (attributes, *attributes.values())
    return [value for value in found if isinstance(value, CONTAINERS) and len(value) <= _MOST_ENTRIES]


def _content_of_cell(cell: CellType) -> object:
    try:
        return cell.cell_contents
    except ValueError:  # it is empty
        return None


def _holds_tensor(value: object, depth: int = _DEPTH) -> bool:
    if isinstance(value, Tensor):
        return True
    if depth == 0 or isinstance(value, (type, ModuleType, nn.Module)):
        return False
    if isinstance(value, dict):
        inner: Iterable[object] = dict.values(value)
    elif isinstance(value, (tuple, *CONTAINERS)):
        inner = value
    else:
        inner = (getattr(value, "__dict__", None),) if _is_users(type(value)) else ()
    return any(_holds_tensor(item, depth - 1) for item in inner)
