"""The memory of a traced step: which storages each of its calls reads and returns, and which autograd keeps for it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

from lightning_3d.torch_internals.autograd import is_cast_of_leaf


@dataclass(frozen=True, kw_only=True)
class CallStorages:
    """The storages of one call, by number; those of weights and buffers are left out."""

    inputs: frozenset[int]
    """Storages of its arguments."""
    outputs: frozenset[int]
    """Storages of its results."""
    saved: frozenset[int]
    """Storages that autograd keeps for its backward, but for copies that autocast made of weights."""


@dataclass(frozen=True, kw_only=True)
class StepStorages:
    """The storages of a step."""

    sizes: tuple[int, ...]
    """Number of a storage -> bytes."""
    of_calls: tuple[CallStorages, ...]
    """One for each call of the trace."""
    of_tensors: dict[int, int]
    """Id of a tensor of the trace -> number of its storage."""

    def num_bytes(self, storages: Iterable[int]) -> int:
        """Bytes of some storages."""
        return sum(self.sizes[number] for number in storages)


class StorageNotes:
    """Notes storages while a step is traced.

    Args:
        weights: Parameters and buffers, as the step computes with them.
    """

    def __init__(self, weights: Iterable[Tensor]) -> None:
        self._weights = {StorageWeakRef(weight.untyped_storage()) for weight in weights}
        self._numbers: dict[StorageWeakRef, int] = {}  # a weak reference keeps its address from being used again
        self._sizes: list[int] = []
        self._calls: list[CallStorages] = []
        self._tensors: dict[int, int] = {}

    @contextmanager
    def noting(self) -> Iterator[set[int]]:
        """Note what autograd keeps of the operators called inside, by number."""
        saved = set[int]()

        def note(tensor: Tensor) -> Tensor:
            if not is_cast_of_leaf(tensor):
                saved.update(self._numbers_of([tensor]))
            return tensor

        with saved_tensors_hooks(note, lambda tensor: tensor):
            yield saved

    def add_call(self, saved: set[int], inputs: Iterable[object], outputs: Iterable[object]) -> None:
        """Note a call that has run.

        Args:
            saved: From `noting`.
            inputs: Leaves of its arguments.
            outputs: Leaves of what it returned.
        """
        self._calls.append(
            CallStorages(inputs=self._numbers_of(inputs), outputs=self._numbers_of(outputs), saved=frozenset(saved))
        )

    def add_tensor(self, number: int, tensor: Tensor) -> None:
        """Note the storage of a tensor that has an id in the trace."""
        for storage in self._numbers_of([tensor]):
            self._tensors[number] = storage

    @property
    def storages(self) -> StepStorages:
        """All that was noted."""
        return StepStorages(sizes=tuple(self._sizes), of_calls=tuple(self._calls), of_tensors=dict(self._tensors))

    def _numbers_of(self, leaves: Iterable[object]) -> frozenset[int]:
        return frozenset(number for leaf in leaves if (number := self._number(leaf)) is not None)

    def _number(self, leaf: object) -> int | None:
        if not isinstance(leaf, Tensor) or leaf.layout is not torch.strided:  # which have storages of their own
            return None
        if (storage := StorageWeakRef(leaf.untyped_storage())) in self._weights:
            return None
        if storage not in self._numbers:
            self._numbers[storage] = len(self._sizes)
            self._sizes.append(leaf.untyped_storage().nbytes())
        return self._numbers[storage]
