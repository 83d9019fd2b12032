"""Looking at the first batch of a dataloader, which goes on as if nobody had.

Dataloaders, samplers and datasets may keep where they are: in attributes, in lists, in generators of random numbers and
in open files. All of that is put back. An iterator, as of a generator function, can't be; it notes what it gives, and
another that begins with that takes its place.
"""

from __future__ import annotations

import copy
import io
import random
from collections.abc import Callable, Iterable, Iterator, MutableMapping, MutableSequence
from contextlib import ExitStack, contextmanager
from itertools import chain
from types import FunctionType, ModuleType
from typing import Any

import numpy as np
import torch
from lightning.pytorch import LightningDataModule, Trainer
from torch import Tensor, nn

from lightning_3d.model.snapshot import CONTAINERS, refill

_DATA = (Tensor, np.ndarray, str, bytes, int, float, complex, type(None))
_LEAVES = (*_DATA, nn.Module, LightningDataModule, Trainer, type, FunctionType, ModuleType)
"""Kinds of values that looking at a batch does not change."""

_MOST_ENTRIES = 10_000
"""Entries of a container up to which they are looked into: more are data."""


@contextmanager
def undisturbed(loader: Any) -> Iterator[None]:
    """Let batches of a dataloader be fetched inside; afterwards it is as before."""
    with ExitStack() as stack:
        _Kept(stack).keep(loader)
        yield


def is_used_up(loader: Any) -> bool:
    """Whether it is an iterator that nothing puts back: a generator, say."""
    return isinstance(loader, Iterator) and not hasattr(loader, "__dict__")


class Peeked:
    """An iterator that is its own dataloader, and can be looked at without losing what it gave.

    Args:
        iterator: Gives each batch once.
    """

    def __init__(self, iterator: Iterator[Any]) -> None:
        self._iterator = iterator

    def __iter__(self) -> Iterator[Any]:
        return self._iterator

    def peek(self) -> Any:
        """The next batch, which it gives again."""
        batch = next(self._iterator)
        self._iterator = chain([batch], self._iterator)
        return batch


class _Noting:
    """An iterator that notes what it gave."""

    def __init__(self, iterator: Iterator[Any]) -> None:
        self._iterator, self.given = iterator, list[Any]()

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        self.given.append(next(self._iterator))
        return self.given[-1]

    def again(self) -> Iterator[Any]:
        """An iterator that gives all of it."""
        return chain(self.given, self._iterator)


class _Kept:
    """Puts objects back to what they are now.

    Args:
        stack: Does it when it ends.
    """

    def __init__(self, stack: ExitStack) -> None:
        self._stack, self._seen = stack, dict[int, Any]()

    def keep(self, value: Any) -> None:
        """Put this back, and all in it."""
        if isinstance(value, _LEAVES) or id(value) in self._seen:
            return
        self._seen[id(value)] = value  # alive, so that its id stays its own
        if (restore := _restorer(value)) is not None:
            self._stack.callback(restore)
        elif isinstance(value, CONTAINERS):
            if len(value) <= _MOST_ENTRIES:
                before = copy.copy(value)
                self._stack.callback(refill, value, before)
                self._keep_entries(value, before)
        elif isinstance(value, tuple):
            for entry in value:
                self.keep(entry)
        elif isinstance(attributes := getattr(value, "__dict__", None), dict):
            before = dict(attributes)
            self._stack.callback(_refilled, attributes, before)
            self._keep_entries(attributes, before)

    def _keep_entries(self, container: Any, before: Any) -> None:
        """Keep what is in a container, which is refilled with ``before`` after that."""
        keys: Iterable[Any] = ()
        if isinstance(container, MutableMapping):
            keys = list(container)
        elif isinstance(container, MutableSequence):
            keys = range(len(container))
        for key in keys:
            entry = container[key]
            if is_used_up(entry) and not isinstance(entry, io.IOBase):
                container[key] = noting = _Noting(entry)
                self._stack.callback(_put_again, before, key, noting)
            else:
                self.keep(entry)


def _restorer(value: Any) -> Callable[[], Any] | None:
    """Puts back the state of a generator of random numbers, or the place in a file."""
    if isinstance(value, torch.Generator):
        state = value.get_state()
        return lambda: value.set_state(state)
    if isinstance(value, random.Random):
        drawn = value.getstate()
        return lambda: value.setstate(drawn)
    if isinstance(value, np.random.Generator):
        bits = value.bit_generator.state
        return lambda: setattr(value.bit_generator, "state", bits)
    if isinstance(value, np.random.RandomState):
        legacy = value.get_state()
        return lambda: value.set_state(legacy)
    if isinstance(value, io.IOBase) and not value.closed and value.seekable():
        place = value.tell()
        return lambda: value.seek(place)
    return None


def _refilled(attributes: dict[str, Any], before: dict[str, Any]) -> None:
    attributes.clear()
    attributes.update(before)


def _put_again(before: Any, key: Any, noting: _Noting) -> None:
    before[key] = noting.again()
