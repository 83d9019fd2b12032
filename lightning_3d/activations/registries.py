"""Registries of a block's modules (parameters, modules, hooks) as its forward had them, for its recomputation.

Code around a block may let other parameters, modules or hooks take their places before the backward:
``torch.func.functional_call``, adapters that are swapped, hooks that are removed after the forward.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from operator import is_
from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule

from lightning_3d.torch_internals.modules import children_of, forward_hook_registries, parameters_of


class Registries:
    """The parameters, modules and forward hooks of some modules as they are now.

    Args:
        modules: Parameters are left alone where one of them is a unit of FSDP2, which gathers and frees them.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        modules = list(modules)
        is_gathered = any(isinstance(module, FSDPModule) for module in modules)
        self._kept = [(own, dict(own)) for module in modules for own in _registries(module, is_gathered)]

    @contextmanager
    def back(self) -> Iterator[None]:
        """Have them inside, and those of now afterwards."""
        with ExitStack() as undone:
            for own, kept in self._kept:
                if not _is_filled_with(own, kept):
                    undone.callback(_fill, own, dict(own))
                    _fill(own, kept)
            yield


def _registries(module: nn.Module, is_gathered: bool) -> list[dict[Any, Any]]:
    registries: list[dict[Any, Any]] = [children_of(module), *forward_hook_registries(module)]
    return registries if is_gathered else [parameters_of(module), *registries]


def _is_filled_with(registry: dict[Any, Any], entries: dict[Any, Any]) -> bool:
    return registry.keys() == entries.keys() and all(map(is_, registry.values(), entries.values()))


def _fill(registry: dict[Any, Any], entries: dict[Any, Any]) -> None:
    registry.clear()
    registry.update(entries)
