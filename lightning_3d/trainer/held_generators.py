"""Generators of random numbers that dataloaders, samplers, datasets and modules hold."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import FunctionType, ModuleType
from typing import Any

import numpy as np
from lightning.pytorch import LightningDataModule, Trainer
from torch import Tensor, nn

from lightning_3d.distributed.generator_states import is_generator

_LEAVES = (Tensor, np.ndarray, str, bytes, int, float, complex, type(None), nn.Module, LightningDataModule, Trainer)
_MOST_ENTRIES = 1_000
"""Entries of a container up to which they are looked into: more are data."""


def generators_of_loaders(loaders: Any) -> list[Any]:
    """All that are found from dataloaders, in an order that is the same for the same loaders."""
    return list(_found(loaders, {}))


def generators_of_modules(module: nn.Module) -> dict[str, Any]:
    """Find the attributes of a module and its submodules that are generators, by name."""
    return {
        f"{prefix}.{name}" if prefix else name: value
        for prefix, owner in module.named_modules()
        for name, value in vars(owner).items()
        if is_generator(value)
    }


def _found(value: Any, seen: dict[int, Any]) -> Iterator[Any]:
    if isinstance(value, (*_LEAVES, type, FunctionType, ModuleType)) or id(value) in seen:
        return
    seen[id(value)] = value
    if is_generator(value):
        yield value
        return
    inner: Any = ()
    if isinstance(value, Mapping):
        inner = value.values() if len(value) <= _MOST_ENTRIES else ()
    elif isinstance(value, list | tuple | set):
        inner = value if len(value) <= _MOST_ENTRIES else ()
    elif isinstance(attributes := getattr(value, "__dict__", None), dict):
        inner = [attributes[name] for name in attributes if name != "_iterator"]  # a DataLoader's, with its workers
    for entry in list(inner):
        yield from _found(entry, seen)
