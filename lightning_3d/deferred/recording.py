"""Recording the construction of a model, and freeing what is not in use.

Owns these workarounds of torch 2.13: the schemas of operators (private, and the only place that says what an operator
writes to), and taking torch functions' modes out of the way while an operator runs.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from typing import Any
from weakref import WeakKeyDictionary, WeakSet, ref

import torch
from torch import Tensor, UntypedStorage, nn
from torch.nn.modules.module import register_module_buffer_registration_hook, register_module_parameter_registration_hook
from torch.overrides import TorchFunctionMode
from torch.utils import swap_tensors
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_leaves

from lightning_3d.deferred.replay import Blank, Contents, Operand, Operation, RandomState, View, compute
from lightning_3d.deferred.tensor import DeferredTensor, LazyStorage

_SMALL = 2**14
"""Bytes up to which a storage is never freed, and is recorded by value."""
_WORKING_SET = 2**25
"""Bytes of recorded storages that may lie in memory besides those in use."""
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
        Tensor._typed_storage,
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
    hooks = [
        register_module_parameter_registration_hook(recorder.on_registration),
        register_module_buffer_registration_hook(recorder.on_registration),
    ]
    try:
        with _Watch(recorder), recorder:
            yield
    finally:
        for hook in hooks:
            hook.remove()
        recorder.finish()


@dataclass(kw_only=True)
class _Call:
    """A call of an operator, before and while it runs."""

    func: torch._ops.OpOverload
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
        self._freed: WeakSet[UntypedStorage] = WeakSet()
        self._resident: WeakSet[UntypedStorage] = WeakSet()
        self._numbers = count()
        self._registered: dict[int, Tensor] = {}

    def on_registration(self, module: nn.Module, name: str, tensor: Tensor | None) -> None:
        """Note a parameter or buffer."""
        if tensor is not None:
            self._registered[id(tensor)] = tensor

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if not all(issubclass(kind, nn.Parameter) or kind is Tensor for kind in types):
            return NotImplemented  # a subclass calls operators on what it holds
        with torch._C.DisableTorchFunction():
            leaves, spec = tree_flatten((args, kwargs or {}))
            call = self._prepared(func, leaves, args, kwargs or {})
            overwritten = self._overwritten(call)
            if func not in _READS_NOTHING:
                for storage in call.inputs:
                    self._bring_back(storage, needs_contents=storage is not overwritten)
            operation = self._operation(call, spec, overwritten)
            results = func(*args, **(kwargs or {}))
            in_use = self._note(call, operation, tree_leaves(results))
            self._free_all_but(in_use)
            return results

    # ---- before an operator runs

    def _prepared(self, func: Any, leaves: list[Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Call:
        written = {
            leaf.untyped_storage()
            for argument in _written_arguments(func, args, kwargs)
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
        leaves = [
            leaf.detach().clone() if isinstance(leaf, Tensor) and not leaf.is_meta and not _is_large(leaf) else leaf
            for leaf in call.leaves
        ]
        for position, tensor in call.views:
            leaves[position] = Operand(input=call.inputs.index(tensor.untyped_storage()), view=View.of(tensor))
        leaves = [leaf.clone_state() if isinstance(leaf, torch.Generator) else leaf for leaf in leaves]
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
            if not _has_storage(result) or not _is_large(result):
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
        self._resident.add(storage)

    def _free_all_but(self, in_use: list[UntypedStorage]) -> None:
        if sum(storage.nbytes() for storage in self._resident) <= _WORKING_SET:
            return
        for storage in [storage for storage in self._resident if storage not in in_use]:
            storage.resize_(0)
            self._resident.discard(storage)
            self._freed.add(storage)

    # ---- the data

    def _bring_back(self, storage: UntypedStorage, *, needs_contents: bool = True) -> None:
        if storage not in self._freed:
            return
        contents = self._recorded[storage]
        storage.resize_(contents.num_bytes)
        if needs_contents:
            with torch.no_grad():
                storage.copy_(compute(contents))
        self._freed.discard(storage)
        self._resident.add(storage)

    def forget(self, storage: UntypedStorage) -> None:
        """Keep this storage in memory from now on."""
        self._bring_back(storage)
        self._recorded.pop(storage, None)
        self._resident.discard(storage)

    def give_away(self, tensor: Tensor) -> None:
        """Keep this tensor in memory from now on."""
        if _has_storage(tensor):
            self.forget(tensor.untyped_storage())

    def deepcopy(self, tensor: Tensor, memo: dict[int, Any]) -> Tensor:
        """``tensor.__deepcopy__(memo)``, whose copy holds the same."""
        storage = tensor.untyped_storage() if _has_storage(tensor) else None
        contents = None if storage is None else self._recorded.get(storage)
        if storage is None or contents is None:
            return tensor.__deepcopy__(memo)
        self._bring_back(storage)
        copied = tensor.__deepcopy__(memo)
        if _has_storage(copied) and copied.untyped_storage() not in self._recorded:
            self._recorded[copied.untyped_storage()] = contents
            self._resident.add(copied.untyped_storage())
        return copied

    # ---- the end

    def finish(self) -> None:
        """Turn recorded parameters and buffers into ``DeferredTensor``s, and fill what else is still in use."""
        lazies: dict[Contents, LazyStorage] = {}
        alive: list[tuple[ref[UntypedStorage], LazyStorage]] = []
        self._warn_of_kept()
        for tensor in self._registered.values():
            storage = tensor.untyped_storage() if _has_storage(tensor) else None
            if storage is None or storage not in self._recorded:
                continue
            if storage not in (known() for known, _ in alive):
                alive.append((ref(storage), LazyStorage(self._recorded[storage])))
        ...
