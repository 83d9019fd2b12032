"""Recording the construction of a model, and freeing what is not in use.

Owns these workarounds of torch 2.13: the schemas of operators (private, and the only place that says what an operator
writes to), and taking modes out of the way.
"""

from __future__ import annotations

import copy
import gc
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import count
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import Tensor, UntypedStorage, nn
from torch.overrides import TorchFunctionMode
from torch.utils import swap_tensors

from lightning_3d.model.deferred.replay import (
    Blank,
    Contents,
    Operand,
    Operation,
    RandomState,
    View,
    compute,
    effort,
    private_copy,
)
from lightning_3d.model.deferred.tensor import DeferredTensor, LazyStorage
from lightning_3d.torch_internals.dispatch import (
    DisableTorchFunction,
    OpOverload,
    TorchDispatchMode,
    no_dispatch_modes,
    written_arguments,
)
from lightning_3d.torch_internals.modules import BUFFERS, PARAMETERS
from lightning_3d.torch_internals.pytree import tree_flatten, tree_leaves
from lightning_3d.torch_internals.tensors import typed_storage

_SMALL = 2**14
"""Bytes up to which a storage is never freed, and is recorded by value."""
_WORKING_SET = 2**25
"""Bytes of recorded storages that may lie in memory besides those in use."""
_PATIENCE = 32
"""How often a storage's size may be written while building to compute it again, before it is kept in memory."""
_TOLD = 2**26
"""Bytes of parameters kept in memory that are worth a warning."""

_OVERWRITES = frozenset(
    {
        torch.ops.aten.normal_,
        torch.ops.aten.uniform_,
        torch.ops.aten.zero_,
        torch.ops.aten.fill_,
        torch.ops.aten.copy_,
        torch.ops.aten.random_,
        torch.ops.aten.exponential_,
        torch.ops.aten.log_normal_,
        torch.ops.aten.cauchy_,
        torch.ops.aten.geometric_,
    }
)
_READS_NOTHING = frozenset({torch.ops.aten.detach.default, torch.ops.aten.alias.default})
_CHANGES_STORAGE = frozenset({torch.ops.aten.set_})  # of a tensor, and nothing in the storage

_GIVES_AWAY = frozenset(
    {
        Tensor.numpy,
        Tensor.__array__,
        Tensor.__dlpack__,
        Tensor.__reduce_ex__,
        Tensor.data_ptr,
        Tensor.storage,
        Tensor.untyped_storage,
        typed_storage,
        Tensor.share_memory_,
    }
)
"""Functions after which memory may be used that operators don't tell of."""


@contextmanager
def defer_init(device: torch.device) -> Iterator[None]:
    """Build modules inside: their large parameters and buffers become ``DeferredTensor``s when the context ends.

    Args:
        device: Where modules are built, if not on the CPU; for its random numbers.
    """
    recorder = _Recorder(device)
    try:
        with _Watch(recorder), recorder:
            yield
    finally:
        recorder.finish()


@dataclass(kw_only=True)
class _Call:
    """A call of an operator, before and while it runs."""

    func: OpOverload
    leaves: list[Any]
    written: set[UntypedStorage]
    inputs: list[UntypedStorage] = field(default_factory=list)
    """Distinct recorded storages among the arguments."""
    views: list[tuple[int, Tensor]] = field(default_factory=list)
    """Position of a leaf -> the tensor, where it lies in one of ``inputs``."""
    is_repeatable: bool = True


class _Recorder(TorchDispatchMode):
    """Sees every operator. A storage is *recorded* if it is large and its contents can be computed again."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch 2.13
        self._device = device
        self._recorded: WeakKeyDictionary[UntypedStorage, Contents] = WeakKeyDictionary()
        self._unrecorded: WeakSet[UntypedStorage] = WeakSet()  # large ones that were seen
        self._freed: WeakSet[UntypedStorage] = WeakSet()
        self._resident: WeakSet[UntypedStorage] = WeakSet()
        self._used_before: WeakSet[UntypedStorage] = WeakSet()
        self._spent: WeakKeyDictionary[UntypedStorage, int] = WeakKeyDictionary()  # bytes written to compute it again
        self._num_bytes = 0  # of the resident ones, at most: those that died since are counted
        self._numbers = count()

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if not all(issubclass(kind, nn.Parameter) or kind is Tensor for kind in types):
            return NotImplemented  # a subclass calls operators on what it holds
        with DisableTorchFunction():
            leaves, spec = tree_flatten((args, kwargs or {}))
            call = self._prepared(func, leaves, args, kwargs or {})
            overwritten = self._overwritten(call)
            was_freed = overwritten in self._freed
            if func not in _READS_NOTHING:
                for storage in call.inputs:
                    self._bring_back(storage, needs_contents=storage is not overwritten)
            if any(storage not in self._recorded for storage in call.inputs):  # one is kept from now on
                call = self._prepared(func, leaves, args, kwargs or {})
            operation = self._operation(call, spec, overwritten)
            try:
                results = func(*args, **(kwargs or {}))
            except BaseException:
                if overwritten is not None and was_freed:
                    self._free(overwritten)
                raise
            in_use = self._note(call, operation, tree_leaves(results))
            self._free_unused(in_use)
            return results

    # ---- before an operator runs

    def _prepared(self, func: Any, leaves: list[Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Call:
        written = {
            leaf.untyped_storage()
            for argument in written_arguments(func, args, kwargs)
            for leaf in tree_leaves(argument)
            if _has_storage(leaf)
        }
        call = _Call(func=func, leaves=leaves, written=written)
        call.is_repeatable = func.namespace == "aten" and func.overloadpacket not in _CHANGES_STORAGE
        for position, leaf in enumerate(leaves):
            if isinstance(leaf, UntypedStorage):
                call.inputs += [leaf] if leaf in self._recorded and leaf not in call.inputs else []
            elif isinstance(leaf, Tensor) and not _has_storage(leaf):
                call.is_repeatable = call.is_repeatable and leaf.is_meta
            elif isinstance(leaf, Tensor):
                storage = leaf.untyped_storage()
                call.is_repeatable = call.is_repeatable and not (leaf.is_conj() or leaf.is_neg())
                if storage in self._recorded:
                    call.inputs += [storage] if storage not in call.inputs else []
                    call.views.append((position, leaf))
                elif storage.nbytes() > _SMALL:
                    call.is_repeatable = False
                    self._unrecorded.add(storage)
        return call

    def _overwritten(self, call: _Call) -> UntypedStorage | None:
        """The storage of which nothing stays."""
        if call.func.overloadpacket not in _OVERWRITES or not call.views or call.views[0][0] != 0:
            return None
        target = call.views[0][1]
        storage = target.untyped_storage()
        is_whole = target.is_contiguous() and target.nbytes == self._recorded[storage].num_bytes
        is_alone = all(tensor.untyped_storage() is not storage for _, tensor in call.views[1:])
        return storage if is_whole and is_alone else None

    def _operation(self, call: _Call, spec: Any, overwritten: UntypedStorage | None) -> Operation | None:
        """The record of the call; None if it can't be repeated."""
        if not call.is_repeatable:
            return None
        operands = {
            position: Operand(input=call.inputs.index(tensor.untyped_storage()), view=View.of(tensor))
            for position, tensor in call.views
        }
        leaves = [operands[i] if i in operands else private_copy(leaf) for i, leaf in enumerate(call.leaves)]
        inputs = []
        for storage in call.inputs:
            contents = self._recorded[storage]
            blank = Blank(num_bytes=contents.num_bytes, device=contents.device)
            inputs.append(blank if storage is overwritten else contents)
        is_random = torch.Tag.nondeterministic_seeded in call.func.tags
        return Operation(
            number=next(self._numbers),
            func=call.func,
            leaves=tuple(leaves),
            spec=spec,
            inputs=tuple(inputs),
            written=frozenset(i for i, storage in enumerate(call.inputs) if storage in call.written),
            random_state=RandomState.now(self._device) if is_random else None,
            default_dtype=torch.get_default_dtype(),
        )

    # ---- after it ran

    def _note(self, call: _Call, operation: Operation | None, results: list[Any]) -> list[UntypedStorage]:
        """Record what it wrote; returns the recorded storages that it used."""
        if any(isinstance(result, Tensor) and not result.is_meta and not _has_storage(result) for result in results):
            for storage in call.inputs:  # a sparse tensor, say, may go on using them
                self.forget(storage)
            return []
        known = {leaf.untyped_storage() for leaf in call.leaves if _has_storage(leaf)}
        known |= {leaf for leaf in call.leaves if isinstance(leaf, UntypedStorage)}
        in_use = list(call.inputs)
        if call.func.overloadpacket not in _CHANGES_STORAGE:
            for i, storage in enumerate(call.inputs):
                if storage in call.written:
                    self._record(storage, operation, is_result=False, position=i)
        for position, result in enumerate(results):
            if not _has_storage(result) or result.untyped_storage().nbytes() <= _SMALL:
                continue
            storage = result.untyped_storage()
            if storage not in known and storage not in self._recorded and storage.resizable():
                self._record(storage, operation, is_result=True, position=position)
                in_use.append(storage)
        return [storage for storage in in_use if storage in self._recorded]

    def _record(self, storage: UntypedStorage, operation: Operation | None, *, is_result: bool, position: int) -> None:
        if operation is None:
            self.forget(storage)
            return
        self._recorded[storage] = Contents(
            operation=operation,
            is_result=is_result,
            position=position,
            num_bytes=storage.nbytes(),
            device=storage.device,
        )
        self._keep(storage)

    def _free_unused(self, in_use: list[UntypedStorage]) -> None:
        """Free what neither this call nor the one before used, of the calls that used recorded storages."""
        if not in_use:
            return
        before, self._used_before = self._used_before, WeakSet(in_use)
        if self._num_bytes <= _WORKING_SET:
            return
        for storage in [s for s in self._resident if s not in self._used_before and s not in before]:
            self._free(storage)
        self._num_bytes = sum(storage.nbytes() for storage in self._resident)

    def _free(self, storage: UntypedStorage) -> None:
        storage.resize_(0)
        self._resident.discard(storage)
        self._freed.add(storage)

    def _keep(self, storage: UntypedStorage) -> None:
        """Count a storage whose data is there."""
        if storage not in self._resident:
            self._num_bytes += storage.nbytes()
        self._freed.discard(storage)
        self._resident.add(storage)

    # ---- the data

    def bring_back(self, tensor: Tensor) -> None:
        """Have the tensor's data in memory for now."""
        if _has_storage(tensor):
            self._bring_back(tensor.untyped_storage())

    def _bring_back(self, storage: UntypedStorage, *, needs_contents: bool = True) -> None:
        if storage not in self._freed:
            return
        contents = self._recorded[storage]
        storage.resize_(contents.num_bytes)
        if needs_contents:
            with no_dispatch_modes():
                storage.copy_(compute(contents))
        self._keep(storage)
        if needs_contents:
            self._spent[storage] = self._spent.get(storage, 0) + effort(contents)
            if self._spent[storage] > _PATIENCE * contents.num_bytes:
                self.forget(storage)

    def forget(self, storage: UntypedStorage) -> None:
        """Keep this storage in memory from now on."""
        self._bring_back(storage)
        self._recorded.pop(storage, None)
        self._resident.discard(storage)
        self._unrecorded.add(storage)

    def give_away(self, tensor: Tensor) -> None:
        """Keep this tensor in memory from now on."""
        if _has_storage(tensor):
            self.forget(tensor.untyped_storage())

    def deepcopy(self, tensor: Tensor, memo: dict[int, Any]) -> Tensor:
        """``tensor.__deepcopy__(memo)``, whose copy holds the same."""
        storage = tensor.untyped_storage() if _has_storage(tensor) else None
        contents = None if storage is None else self._recorded.get(storage)
        if storage is None or contents is None:
            return copy.deepcopy(tensor, memo)
        self._bring_back(storage)
        with no_dispatch_modes():
            copied = copy.deepcopy(tensor, memo)
        if _has_storage(copied) and copied.untyped_storage() not in self._recorded:
            self._recorded[copied.untyped_storage()] = contents
            self._keep(copied.untyped_storage())
        return copied

    # ---- the end

    def finish(self) -> None:
        """Turn recorded parameters and buffers into ``DeferredTensor``s, and fill what else is still in use."""
        lazies: dict[UntypedStorage, LazyStorage] = {}
        kept: dict[UntypedStorage, Tensor] = {}
        for tensor in _tensors_of_modules():
            storage = tensor.untyped_storage()
            if storage in self._recorded:
                _defer(tensor, lazies.setdefault(storage, LazyStorage(self._recorded[storage])))
            elif storage in self._unrecorded:
                kept[storage] = tensor
            del storage, tensor
        lazy_of = WeakKeyDictionary(lazies)
        del lazies  # and with it the last references to storages that only deferred tensors used
        for storage in list(self._recorded):  # those that are left are used otherwise too
            self._bring_back(storage)
            if storage in lazy_of:
                lazy_of[storage].storage = storage
        self._recorded.clear()
        _warn_of(kept)


class _Watch(TorchFunctionMode):
    """Sees what reaches a tensor's memory without an operator."""

    def __init__(self, recorder: _Recorder) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _GIVES_AWAY:
            self._recorder.give_away(args[0])
        elif func is Tensor.tolist:
            self._recorder.bring_back(args[0])
        elif func is Tensor.__deepcopy__:
            return self._recorder.deepcopy(*args, **kwargs)
        return func(*args, **kwargs)


def _tensors_of_modules() -> Iterator[Tensor]:
    """Every plain parameter and buffer of every module in this process, however it got there.

    Found by the garbage collector, as hooks on registration miss modules that were copied.
    """
    modules = [thing for thing in gc.get_objects() if issubclass(type(thing), nn.Module)]
    seen: set[int] = set()
    while modules:
        state = vars(modules.pop())
        for tensor in [*state.get(PARAMETERS, {}).values(), *state.get(BUFFERS, {}).values()]:
            if type(tensor) in (Tensor, nn.Parameter) and id(tensor) not in seen and _has_storage(tensor):
                seen.add(id(tensor))
                yield tensor


def _warn_of(kept: Mapping[UntypedStorage, Tensor]) -> None:
    num_bytes = sum(storage.nbytes() for storage in kept)
    if num_bytes <= _TOLD:
        return
    shapes = ", ".join(str(tuple(tensor.shape)) for tensor in list(kept.values())[:3])
    warnings.warn(
        f"{num_bytes / 2**20:,.0f} MiB of parameters and buffers (of shapes {shapes}, ...) stay in memory on every rank"
        " until the model is split into pipeline stages: their values come from files, numpy or another thread, so they"
        " can't be computed again. The result is the same.",
        stacklevel=5,
    )


def _defer(tensor: Tensor, lazy: LazyStorage) -> None:
    if tensor.grad_fn is not None:
        return
    deferred = DeferredTensor(
        tensor, lazy, is_parameter=isinstance(tensor, nn.Parameter), requires_grad=tensor.requires_grad
    )
    deferred.__dict__.update(tensor.__dict__)
    with suppress(RuntimeError):  # something holds a weak reference to it, or a graph: it stays as it is
        swap_tensors(tensor, deferred)


def _has_storage(leaf: Any) -> bool:
    """Whether it is a plain strided tensor with data."""
    return (
        isinstance(leaf, Tensor)
        and type(leaf) is not DeferredTensor
        and not leaf.is_meta
        and leaf.layout == torch.strided
        and not leaf.is_quantized
    )
