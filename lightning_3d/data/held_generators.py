"""The objects that dataloaders, samplers, datasets and modules hold, among them generators of random numbers."""

from __future__ import annotations

import io
from collections import deque
from collections.abc import Iterable, Iterator
from types import FunctionType, ModuleType

import numpy as np
from lightning.pytorch import LightningDataModule, Trainer
from torch import Tensor, nn

from lightning_3d.distributed.generator_states import is_generator

_DATA = (Tensor, np.ndarray, str, bytes, int, float, complex, type(None))
_LEAVES = (*_DATA, nn.Module, LightningDataModule, Trainer, type, FunctionType, ModuleType)
_MOST_ENTRIES = 10_000
"""Entries of a container up to which they are looked into: more are data."""


def generators_of_loaders(loaders: object) -> list[object]:
    """All that are found from dataloaders, in an order that is the same for the same loaders."""
    return [held for held in held_by(loaders) if is_generator(held)]


def generators_of_modules(module: nn.Module) -> dict[str, object]:
    """Find the attributes of a module and its submodules that are generators, by name."""
    return {
        f"{prefix}.{name}" if prefix else name: value
        for prefix, owner in module.named_modules()
        for name, value in vars(owner).items()
        if is_generator(value)
    }


def held_by(value: object, seen: dict[int, object] | None = None) -> Iterator[object]:
    """A value and all that it holds: containers, generators of random numbers, files, and objects with attributes."""
    seen = {} if seen is None else seen
    if isinstance(value, _LEAVES) or id(value) in seen:
        return
    seen[id(value)] = value  # alive, so that its id stays its own
    inner: Iterable[object] = ()
    if is_generator(value) or isinstance(value, io.IOBase):
        yield value
    elif isinstance(value, dict | tuple | list | deque | set):
        if len(value) <= _MOST_ENTRIES:
            yield value
            inner = value.values() if isinstance(value, dict) else value
    elif isinstance(attributes := getattr(value, "__dict__", None), dict):
        yield value
        inner = [attributes[name] for name in attributes if name != "_iterator"]  # a DataLoader's, with its workers
    for entry in list(inner):
        yield from held_by(entry, seen)
