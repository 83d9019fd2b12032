"""The record of what was written to storages, and computing it again.

Owns one workaround: recomputing may be asked for inside any dispatch mode (a fake one, say), and torch 2.13 has only a
private call to step out of them.
"""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, UntypedStorage

from lightning_3d.model.reals import as_reals
from lightning_3d.torch_internals.dispatch import DisableTorchFunction, OpOverload, no_dispatch_modes
from lightning_3d.torch_internals.pytree import TreeSpec, tree_leaves, tree_unflatten

_UNINITIALISED = frozenset(
    {
        torch.ops.aten.empty,
        torch.ops.aten.empty_like,
        torch.ops.aten.empty_strided,
        torch.ops.aten.empty_permuted,
        torch.ops.aten.new_empty,
        torch.ops.aten.new_empty_strided,
    }
)


@dataclass(frozen=True, kw_only=True)
class View:
    """How a tensor sees its storage; sizes and offset in elements."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype

    @staticmethod
    def of(tensor: Tensor) -> View:
        """The view that a strided tensor is of its storage."""
        return View(
            size=tuple(tensor.size()), stride=tensor.stride(), offset=int(tensor.storage_offset()), dtype=tensor.dtype
        )

    def on(self, storage: UntypedStorage) -> Tensor:
        """The same view of another storage."""
        return torch.empty(0, dtype=self.dtype, device=storage.device).set_(
            storage, self.offset, self.size, self.stride
        )


@dataclass(frozen=True, kw_only=True)
class Blank:
    """A storage that an operation overwrites whole, so that it doesn't matter what it held."""

    num_bytes: int
    device: torch.device


@dataclass(frozen=True, kw_only=True)
class Operand:
    """A tensor argument of an operation: a view of one of its inputs."""

    input: int
    view: View


@dataclass(frozen=True, kw_only=True)
class RandomState:
    """State of the default generators."""

    cpu: Tensor
    accelerator: Tensor | None
    device: torch.device

    @staticmethod
    def now(device: torch.device) -> RandomState:
        """The states of the CPU's generator and, if it is another, of the device's."""
        accelerator = None if device.type == "cpu" else torch.get_device_module(device).get_rng_state(device)
        return RandomState(cpu=torch.get_rng_state(), accelerator=accelerator, device=device)

    def restore(self) -> None:
        """Go back to it."""
        torch.set_rng_state(self.cpu)
        if self.accelerator is not None:
            torch.get_device_module(self.device).set_rng_state(self.accelerator, self.device)


@dataclass(frozen=True, kw_only=True, eq=False)
class Operation:
    """A call of an operator that wrote to large storages."""

    number: int
    """Place in the order of all calls."""
    func: OpOverload
    leaves: tuple[Any, ...]
    """Flat arguments: an ``Operand`` for a large tensor, small tensors and generators as copies, the rest as it was."""
    spec: TreeSpec
    inputs: tuple[Contents | Blank, ...]
    """The distinct large storages among the arguments, as they were before the call."""
    written: frozenset[int]
    """Which of ``inputs`` it writes to."""
    random_state: RandomState | None
    """Before the call, if it draws random numbers."""
    default_dtype: torch.dtype

    def run(self, storages: list[UntypedStorage]) -> list[Any]:
        """Call it on copies of its inputs; returns the flat results."""
        leaves = [
            leaf.view.on(storages[leaf.input]) if isinstance(leaf, Operand) else private_copy(leaf)
            for leaf in self.leaves
        ]
        args, kwargs = tree_unflatten(leaves, self.spec)
        default_dtype = torch.get_default_dtype()
        torch.set_default_dtype(self.default_dtype)
        try:
            if self.random_state is not None:
                self.random_state.restore()
            results = tree_leaves(self.func(*args, **kwargs))
        finally:
            torch.set_default_dtype(default_dtype)
        if self.func.overloadpacket in _UNINITIALISED:  # the same on every rank
            for result in results:
                result.zero_()
        return results


@dataclass(frozen=True, kw_only=True, eq=False)
class Contents:
    """The content of one storage after one operation."""

    operation: Operation
    is_result: bool
    """Whether the operation made the storage; else it wrote to one of its inputs."""
    position: int
    """Among the operation's flat results, or among its inputs."""
    num_bytes: int
    device: torch.device


def compute(wanted: Contents) -> UntypedStorage:
    """Run the recorded operations that led to ``wanted``, on new storages; random states are left as they are."""
    needed = _needed([wanted])
    uses = Counter(source for operation in _operations(needed) for source in operation.inputs)
    uses[wanted] += 1
    produced: dict[Operation, list[Contents]] = {}
    for contents in needed:
        produced.setdefault(contents.operation, []).append(contents)
    held: dict[Contents, UntypedStorage] = {}
    with no_dispatch_modes(), DisableTorchFunction(), torch.no_grad():
        random_state = RandomState.now(wanted.device)
        for operation in _operations(needed):
            storages = [_take(operation, i, held, uses) for i in range(len(operation.inputs))]
            results = operation.run(storages)
            for contents in produced[operation]:
                position = contents.position
                held[contents] = results[position].untyped_storage() if contents.is_result else storages[position]
        random_state.restore()
    return held[wanted]


def effort(wanted: Contents) -> int:
    """Bytes written to compute ``wanted``, counting whole storages."""
    return sum(contents.num_bytes for contents in _needed([wanted]))


def fingerprint(wanted: Iterable[Contents]) -> int:
    """A checksum of all that the computation of ``wanted`` depends on: equal records give equal contents, on devices of
    one type, of whatever index.
    """
    checksum = 0
    names: dict[Operation, int] = {}
    for operation in _operations(_needed(wanted)):
        names[operation] = len(names)
        inputs = [
            (names[source.operation], source.is_result, source.position)
            if isinstance(source, Contents)
            else (source.num_bytes, source.device.type)
            for source in operation.inputs
        ]
        described = [str(operation.func), inputs, operation.default_dtype]
        described += [_described(leaf) for leaf in operation.leaves]
        checksum = zlib.crc32(repr(described).encode(), checksum)
        state = operation.random_state
        for tensor in () if state is None else (state.cpu, state.accelerator):
            checksum = zlib.crc32(repr(_described(tensor)).encode(), checksum)
    return checksum


_HASHED = frozenset(
    {
        *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
        *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
    }
)
"""Dtypes that ``torch.hash_tensor`` takes."""


def hash_of(tensor: Tensor) -> int:
    """A checksum of a tensor's data."""
    values = as_reals(tensor.detach())
    values = values if values.dtype in _HASHED else values.contiguous().view(-1).view(torch.uint8)
    return int(torch.hash_tensor(values).view(torch.int64)) if tensor.numel() else 0


def _described(leaf: Any) -> Any:
    if isinstance(leaf, torch.device):
        return leaf.type
    state = leaf.get_state() if isinstance(leaf, torch.Generator) else leaf
    return hash_of(state) if isinstance(state, Tensor) else leaf


def private_copy(leaf: Any) -> Any:
    """An argument of a call as it is now: small tensors and generators as copies."""
    if isinstance(leaf, Tensor):
        return leaf.detach().clone()
    return leaf.clone_state() if isinstance(leaf, torch.Generator) else leaf


def _needed(wanted: Iterable[Contents]) -> set[Contents]:
    """All contents that these are computed from, with themselves."""
    needed: set[Contents] = set()
    waiting = list(wanted)
    while waiting:
        contents = waiting.pop()
        if contents not in needed:
            needed.add(contents)
            waiting += [source for source in contents.operation.inputs if isinstance(source, Contents)]
    return needed


def _operations(needed: set[Contents]) -> list[Operation]:
    return sorted({contents.operation for contents in needed}, key=lambda operation: operation.number)


def _take(
    operation: Operation, i: int, held: dict[Contents, UntypedStorage], uses: Counter[Contents | Blank]
) -> UntypedStorage:
    """The storage for an input of an operation: a copy if it is written to and needed again."""
    source = operation.inputs[i]
    if isinstance(source, Blank):
        return UntypedStorage(source.num_bytes, device=source.device)
    storage = held[source]
    uses[source] -= 1
    if uses[source] == 0:
        del held[source]
    elif i in operation.written:
        storage = storage.clone()
    return storage
