"""The memory of a traced step: which storages each of its calls reads and returns, and which autograd keeps for it."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

from lightning_3d.activations.selective import is_costly
from lightning_3d.torch_internals.autograd import is_cast_of_leaf
from lightning_3d.torch_internals.dispatch import OperatorMode
from lightning_3d.torch_internals.pytree import tree_leaves


@dataclass(frozen=True, kw_only=True)
class CallStorages:
    """The storages of one call, by number; those of weights and buffers are left out."""

    inputs: frozenset[int]
    """Storages of its arguments."""
    outputs: frozenset[int]
    """Storages of its results."""
    saved: frozenset[int]
    """Storages that autograd keeps for its backward."""
    casts: frozenset[int]
    """Copies that autocast made of weights; some of ``saved``."""
    costly: frozenset[int]
    """Results of the operators that selective recomputation keeps."""
    slices: Mapping[int, int] = field(default_factory=dict)
    """Storage of an argument -> that of its slice, from which recomputation gathers it."""

    @property
    def sources(self) -> frozenset[int]:
        """Storages that recomputation begins with: its inputs, or slices of them."""
        return frozenset(self.slices.get(number, number) for number in self.inputs)


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

    def with_slices(self, tensors: Mapping[int, Iterable[int]], number: int) -> StepStorages:
        """The same where recomputation keeps slices of arguments.

        Args:
            tensors: Position of a call -> ids of the tensors that it slices.
            number: Slices of a tensor.
        """
        sizes, calls = list(self.sizes), list(self.of_calls)
        for position, sliced in tensors.items():
            slices = {}
            for storage in {self.of_tensors[i] for i in sliced if i in self.of_tensors}:
                slices[storage] = len(sizes)
                sizes.append(sizes[storage] // number)
            calls[position] = replace(calls[position], slices=slices)
        return replace(self, sizes=tuple(sizes), of_calls=tuple(calls))

    def without_casts(self) -> StepStorages:
        """The same where the copies that autocast makes of weights are not kept for each call."""
        calls = (replace(call, saved=call.saved - call.casts) for call in self.of_calls)
        return replace(self, of_calls=tuple(calls))

    def divided(self, storages: Collection[int], number: int) -> StepStorages:
        """The same with some storages shared by a number of ranks."""
        sizes = (size // number if i in storages else size for i, size in enumerate(self.sizes))
        return replace(self, sizes=tuple(sizes))


@dataclass(kw_only=True)
class _Noted:
    """A call while it runs."""

    saved: set[int] = field(default_factory=set)
    casts: set[int] = field(default_factory=set)
    costly: set[int] = field(default_factory=set)


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
    def noting(self) -> Iterator[_Noted]:
        """Note what autograd keeps of the operators called inside."""
        noted = _Noted()

        def note(tensor: Tensor) -> Tensor:
            numbers = self._numbers_of([tensor])
            noted.saved |= numbers
            if is_cast_of_leaf(tensor):
                noted.casts |= numbers
            return tensor

        with saved_tensors_hooks(note, lambda tensor: tensor), _CostlyResults(self, noted):
            yield noted

    def add_call(self, noted: _Noted, inputs: Iterable[Any], outputs: Iterable[Any]) -> None:
        """Note a call that has run.

        Args:
            inputs: Leaves of its arguments.
            outputs: Leaves of what it returned.
        """
        self._calls.append(
            CallStorages(
                inputs=self._numbers_of(inputs),
                outputs=self._numbers_of(outputs),
                saved=frozenset(noted.saved),
                casts=frozenset(noted.casts),
                costly=frozenset(noted.costly),
            )
        )

    def add_tensor(self, number: int, tensor: Tensor) -> None:
        """Note the storage of a tensor that has an id in the trace."""
        for storage in self._numbers_of([tensor]):
            self._tensors[number] = storage

    @property
    def storages(self) -> StepStorages:
        """All that was noted."""
        return StepStorages(sizes=tuple(self._sizes), of_calls=tuple(self._calls), of_tensors=dict(self._tensors))

    def _numbers_of(self, leaves: Iterable[Any]) -> frozenset[int]:
        return frozenset(number for leaf in leaves if (number := self._number(leaf)) is not None)

    def _number(self, leaf: Any) -> int | None:
        if not isinstance(leaf, Tensor) or (storage := StorageWeakRef(leaf.untyped_storage())) in self._weights:
            return None
        if storage not in self._numbers:
            self._numbers[storage] = len(self._sizes)
            self._sizes.append(leaf.untyped_storage().nbytes())
        return self._numbers[storage]

    def note_costly(self, noted: _Noted, results: Any) -> None:
        """Note what a costly operator returned."""
        noted.costly |= self._numbers_of(tree_leaves(results))


class _CostlyResults(OperatorMode):
    """Notes the results of costly operators."""

    def __init__(self, notes: StorageNotes, noted: _Noted) -> None:
        super().__init__()
        self._notes, self._noted = notes, noted

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        results = func(*args, **(kwargs or {}))
        if is_costly(func):
            self._notes.note_costly(self._noted, results)
        return results
