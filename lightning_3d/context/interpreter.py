"""Answering the calls of a step whose sequences are cut: on slices, with operands moved where that is not possible.

Weights are whole on every rank, and the ranks of the axis count as replicas of them: a gradient is the mean over the
ranks. So what meets a weight with its slice alone multiplies its gradient by their number; what all ranks compute
alike counts as it is.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import override

from lightning_3d.config.context import ContextConfig
from lightning_3d.context.attention import attends_on_slices, by_way, refused
from lightning_3d.context.axis import ContextAxis, comes_of_weights
from lightning_3d.context.choice import Local, Sequences, Target, cheapest, moves_of
from lightning_3d.context.rows import MOVES, Moved, as_move
from lightning_3d.context.rules import RULES as OWN_RULES
from lightning_3d.context.rules import take_one_row
from lightning_3d.errors import PlanError
from lightning_3d.model.block_runner import is_own
from lightning_3d.sharding.collectives import redistribute
from lightning_3d.sharding.gradient_factor import with_gradient_times
from lightning_3d.sharding.interpret import ByTensor, Interpreter
from lightning_3d.sharding.placement import (
    REPLICATE,
    REPLICATE_PARTIAL_GRAD,
    Placement,
    Replicate,
    Sharded,
)
from lightning_3d.sharding.rules.call import InputPlacement, LocalCall, TorchCall
from lightning_3d.sharding.rules.function import MEMORY, ON_WHOLE, Function, map_tensors, tensors_in
from lightning_3d.sharding.rules.generic import generic
from lightning_3d.sharding.rules.table import RULES
from lightning_3d.sharding.sealed_tensor import SealedTensor, opened, sealed
from lightning_3d.sharding.sharded_tensor import ShardedTensor, placement_of
from lightning_3d.tensor.vocabulary.lazy_tensor import made
from lightning_3d.torch_internals.attention_kernels import allowed_kernels
from lightning_3d.torch_internals.autograd import calls_backward_hooks
from lightning_3d.torch_internals.dispatch import DisableTorchFunction, no_dispatch_modes
from lightning_3d.torch_internals.fsdp import is_hook_of_fsdp, passes_tensors_on
from lightning_3d.torch_internals.tensors import VERSION, storage_id, version_of
from lightning_3d.zero.outside_reads import unsharded, whole_of

_VIEWS = """
__getitem__ narrow select split split_with_sizes chunk tensor_split unbind diagonal view view_as
reshape flatten unflatten squeeze unsqueeze expand expand_as unfold transpose swapaxes swapdims
permute movedim moveaxis t T mT detach as_strided
"""
VIEWS = frozenset(_VIEWS.split())
"""Names of calls that give views, if no tensor is among the indices."""

_MAX_ANSWERS = 8192
"""Calls of which it is kept how they are made."""

_TAKES_ROW = frozenset({"__getitem__", "select"})
"""Names of calls that may take one row, which costs less than to move its tensor."""

_OF_MEMORY = frozenset({"is_contiguous", "is_inference", VERSION})
"""Calls that ask how a slice lies in memory: as the whole does."""


class ContextInterpreter(Interpreter):
    """Active during one step.

    Args:
        axis: The axis that sequences are cut over.
        config: The way of attention on slices, and the order of their rows in it.
        is_outer: Whether blocks may have interpreters of their own, to which slices are sealed.
    """

    shards_weights = False

    remedy = "use context_parallel_size=1"

    axis: ContextAxis

    def __init__(self, axis: ContextAxis, config: ContextConfig, *, is_outer: bool = False) -> None:
        super().__init__(axis)
        self._attention, self._by_way = config.attention, by_way(config.order)
        of_attention = self._by_way["ring"], self._by_way["gather"]
        self._own_rules = {**OWN_RULES, "scaled_dot_product_attention": of_attention}
        self._is_outer = is_outer
        self.sequences = Sequences(lengths=frozenset(), batch=0)
        self._ways: dict[tuple[Any, ...], Sequence[Target] | None] = {}  # by what is known of a call
        self._moves: dict[tuple[Any, ...], Moved | None] = {}
        self.block = ""
        """FQN of the block that was called last."""
        self.moves_by_call: dict[tuple[str, str, int], str] = {}
        """Name of a call, how its operands move, and the bytes -> the first block that it was made in."""
        self._gathered: ByTensor[Tensor] = ByTensor()  # by slice
        self._parts_read: dict[int, Tensor] = {}  # gathered tensors by id, of which each rank reads a part
        # In place of views in one process: slices by their memory with the call, whole ones with their version.
        self._copied_slices: dict[int, tuple[weakref.ref[Tensor], str]] = {}
        self._copied_whole: list[tuple[Tensor, int, str]] = []

    def check_copies(self) -> None:
        """Raise where a step has changed in place what is a view in one process, and here has memory of its own."""
        copies, self._copied_whole = self._copied_whole, []
        self._copied_slices.clear()
        for tensor, version, name in copies:
            if version_of(tensor) != version:
                raise self._refused_view(name, tensor)

    def _refused_view(self, name: str, tensor: Tensor) -> PlanError:
        return PlanError(
            f"a result of {name}, of shape {tuple(tensor.shape)} and a view of a tensor that is cut along its sequence,"
            " was changed in place, which would leave that tensor as it was. Make a new tensor in place of it, or"
            f" {self.remedy}."
        )

    def begin(self) -> None:
        """Forget the tensors and the sequences of the step before."""
        self.forget()
        self.sequences = Sequences(lengths=frozenset(), batch=0)

    def forget(self) -> None:
        """Let go of tensors that were gathered, as where a block begins."""
        self._entered, self._gathered, self._parts_read = ByTensor(), ByTensor(), {}

    @override
    def __torch_function__(
        self, func: Function, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if not self._is_outer:
            return super().__torch_function__(func, types, args, kwargs)
        kwargs, tensors = kwargs or {}, tensors_in((args, kwargs))
        if any(isinstance(tensor, ShardedTensor) and tensor.axis is not self.axis for tensor in tensors):
            return func(*args, **kwargs)  # the interpreter of that axis asks
        if not any(map(_is_sealed, tensors)):
            return super().__torch_function__(func, types, args, kwargs)
        given, options = map_tensors(opened, (args, kwargs))
        return map_tensors(sealed, super().__torch_function__(func, types, given, options))

    @override
    def dispatch(self, call: TorchCall) -> Any:
        if not any(isinstance(tensor, ShardedTensor) for tensor in call.tensors):
            return self.run_plain(call)
        if call.name == "register_hook" and is_hook_of_fsdp(call.args[1]):  # it asks when a gradient comes
            return call.first.own().register_hook(*call.args[1:])
        if call.name == "register_hook":
            return self._register_hook(*call.args)
        if call.name == "retain_grad":
            raise PlanError(
                f"retain_grad of a tensor {tuple(call.first.shape)} that is cut along its sequence: each rank gets its"
                f" own slice of the gradient alone. Look at it by register_hook, or {self.remedy}."
            )
        if call.name in _OF_MEMORY:
            return call.run(*(tensor.own() if isinstance(tensor, ShardedTensor) else tensor for tensor in call.tensors))
        if call.function is torch.autograd.grad:
            return self._gradients(*call.args, **call.kwargs)
        if call.destination is not None or call.name == "__setitem__":
            return self._in_place(call)
        if call.name in _TAKES_ROW and (row := take_one_row(call, self.axis)) is not None:
            return self._noted(call, self.execute(call, row))
        if call.name in MOVES and (move := self._moved_rows(call)) is not None:
            return self._noted(call, move.carry_out(call, self.axis, lambda tensor: self.read_by_each(tensor, [])))
        ready = self._ready(call)
        if ready is None:
            return self._noted(call, self.execute(call, self._on_whole(call)))
        result = self.execute(*ready)
        return result if ready[0] is call else self._noted(call, result)

    def _register_hook(self, tensor: ShardedTensor, hook: Callable[[Tensor], Tensor | None]) -> Any:
        """Show a hook of the user's the gradient as a tensor that is cut as this one is."""

        def on_slice(gradient: Tensor) -> Tensor | None:
            with self:
                changed = hook(ShardedTensor(gradient, self.axis, tensor.placement))
            return None if changed is None else self.operand(changed, tensor.placement, [])

        return tensor.own().register_hook(on_slice)

    def _noted(self, call: TorchCall, result: Any) -> Any:
        """A result that has memory of its own, noted where one process has a view."""
        if call.name in VIEWS and len(call.tensors) == 1:
            for made in tensors_in(result):
                if isinstance(made, ShardedTensor):
                    self._copied_slices[_memory(made.local)] = weakref.ref(made.local), call.name
                else:
                    self._copied_whole.append((made, version_of(made), call.name))
        return result

    def _moved_rows(self, call: TorchCall) -> Moved | None:
        """The rows that a call moves, where it does no more than that and is not local."""
        if all(isinstance(tensor, ShardedTensor) or tensor.is_floating_point() for tensor in call.tensors):
            return self._known(self._moves, call, self._as_move)  # type: ignore[no-any-return]
        with no_dispatch_modes():
            return self._as_move(call)  # the values of an index decide

    def _as_move(self, call: TorchCall) -> Moved | None:
        return as_move(call) if self._local(call) is None else None

    def _ready(self, call: TorchCall, fixed: Tensor | None = None) -> tuple[TorchCall, LocalCall] | None:
        """The call with its operands where it is local, and how it is made; None if it is local nowhere."""
        form = self._form(call)
        way = self._known(self._ways, call, functools.partial(self._find_way, form=form, fixed=fixed), fixed)
        if way is None:
            return None
        targets = iter(way)

        def moved(tensor: Tensor) -> Tensor:
            target = next(targets)
            if target is None:
                return tensor
            if isinstance(target, Replicate):
                return self.read_by_each(tensor, [])
            assert isinstance(tensor, ShardedTensor)
            return ShardedTensor(self.moved(tensor, target), self.axis, target)

        if any(target is not None for target in way):
            call = call.mapped(moved)
        local = form(call)
        assert local is not None, "it was on stand-ins that lie alike"
        return call, local

    def _form(self, call: TorchCall) -> Local:
        """How a call may be made: attention on slices in the way that the settings name."""
        if self._attention == "auto" or not attends_on_slices(call):
            return self._local
        rule = self._by_way[self._attention]
        return lambda moved: rule(moved, self.axis)

    def _find_way(self, call: TorchCall, form: Local, fixed: Tensor | None) -> Sequence[Target] | None:
        way = cheapest(call, self.axis, form, self.sequences, fixed)
        if (moves := moves_of(call, way, self.axis, form)) is not None:
            self.moves_by_call.setdefault((call.name, *moves), self.block)
        return way

    def _known(
        self,
        answers: dict[tuple[Any, ...], Any],
        call: TorchCall,
        find: Callable[[TorchCall], Any],
        fixed: Tensor | None = None,
    ) -> Any:
        described = map_tensors(
            lambda tensor: _Shown((tuple(tensor.shape), tensor.dtype, placement_of(tensor), tensor is fixed)),  # type: ignore[arg-type,return-value]
            (call.args, call.kwargs),
        )
        key = (call.function, repr(described), self.sequences, allowed_kernels())
        if len(answers) >= _MAX_ANSWERS:  # batches of ever new lengths
            answers.clear()
        if key not in answers:
            with no_dispatch_modes():  # so that a recomputation, which finds an answer here, sees the same operators
                answers[key] = find(call)
        return answers[key]

    def _local(self, call: TorchCall) -> LocalCall | None:
        """How every rank makes a call on what it has; None if it can't."""
        for rule in (*self._own_rules.get(call.name, ()), *RULES.get(call.name, ())):
            if (local := rule(call, self.axis)) is not None:
                return None if all(at == REPLICATE for at in local.input_placements) else local
        is_refused = call.name in ON_WHOLE or call.name in MEMORY
        return None if is_refused else generic(call, self.axis)

    def _on_whole(self, call: TorchCall) -> LocalCall:
        """Every rank makes the whole call, and goes on with its slice of results as long as an operand's cut dim."""
        if call.name in MEMORY:
            return self._other(call)  # which raises
        if self._attention != "auto" and attends_on_slices(call):
            raise refused(call, self._attention, self.axis)
        cuts = {
            (tensor.placement, tensor.shape[tensor.placement.dim])
            for tensor in (call.tensors if call.name not in ON_WHOLE else ())
            if isinstance(tensor, ShardedTensor)
        }

        def own(result: Tensor) -> Tensor:
            for at, length in cuts:
                if result.is_floating_point() and result.dim() > at.dim and result.shape[at.dim] == length:
                    return ShardedTensor(at.own(result, self.axis.size, self.axis.rank).clone(), self.axis, at)
            return with_gradient_times(result, 1 / self.axis.size) if result.requires_grad else result

        def run(*tensors: Tensor) -> Any:
            return map_tensors(own, call.run(*tensors))

        each = (REPLICATE_PARTIAL_GRAD,) * len(call.tensors)
        return LocalCall(tensors=call.tensors, input_placements=each, run=run)

    def _in_place(self, call: TorchCall) -> Any:
        """A call that changes a tensor, which stays where it is; else all of it is changed, and cut again."""
        changed = call.first if call.name == "__setitem__" else call.destination
        if not isinstance(changed, ShardedTensor) or call.name == "requires_grad_":
            return super().dispatch(call)
        copied = self._copied_slices.get(_memory(changed.own()))
        if copied is not None and copied[0]() is not None:
            raise self._refused_view(copied[1], changed)
        if (ready := self._ready(call, fixed=changed)) is not None:
            return self.execute(*ready)
        whole = self._gather(changed).clone()
        call = call.mapped(lambda tensor: whole if tensor is changed else self.read_by_each(tensor, []))
        call.function(*call.args, **call.kwargs)
        changed.own().copy_(changed.placement.own(whole, self.axis.size, self.axis.rank))
        changed.follow_local()
        return changed

    def _gradients(
        self, outputs: Any, inputs: Any, grad_outputs: Any = None, create_graph: bool = False, **options: Any
    ) -> tuple[Tensor | None, ...]:
        """``torch.autograd.grad``, which all ranks call: of slices a rank gets its slice of the gradient."""
        sources = [inputs] if isinstance(inputs, Tensor) else list(inputs)
        if any(not isinstance(source, ShardedTensor) and _is_of_weights(source) for source in sources):
            raise PlanError(
                "torch.autograd.grad of weights inside of a step would give each rank the gradient of its own slices of"
                f" sequences alone. Let the backward of the step make it, or {self.remedy}."
            )
        own = _own((outputs, sources, grad_outputs))
        with DisableTorchFunction():
            found: Any = torch.autograd.grad(*own, create_graph=create_graph, **options)  # type: ignore[call-overload]
        return self._wrapped(
            found,
            (
                placement_of(source) if gradient is not None else None
                for gradient, source in zip(found, sources, strict=True)
            ),
        )

    @override
    def read_by_each(self, tensor: Tensor, contexts: list[AbstractContextManager[Any]]) -> Tensor:
        if isinstance(tensor, ShardedTensor):
            return self._gathered.get(made(tensor.local), functools.partial(self._gather, tensor))
        if id(tensor) in self._parts_read:
            return tensor
        if whole_of(tensor) is not None:  # of which ZeRO stage 3 has left each rank a share
            with DisableTorchFunction():
                tensor = unsharded(tensor)
        if tensor.requires_grad and torch.is_grad_enabled() and _is_of_weights(tensor):
            return self._entered.get(tensor, lambda: with_gradient_times(tensor, self.axis.size))
        return super().read_by_each(tensor, contexts)

    @override
    def moved(self, tensor: ShardedTensor, target: Placement) -> Tensor:
        return redistribute(made(tensor.own()), self.axis, tensor.placement, target)

    @override
    def sum(self, summand: Tensor, local: LocalCall) -> Tensor:
        return super().sum(made(summand), local)

    def _gather(self, tensor: ShardedTensor) -> Tensor:
        """All of it, of which the ranks read parts: its gradient is the sum of theirs."""
        full = self.moved(tensor, REPLICATE_PARTIAL_GRAD)
        self._parts_read[id(full)] = full
        return full

    @override
    def operand(
        self, tensor: Tensor, input_placement: InputPlacement, contexts: list[AbstractContextManager[Any]]
    ) -> Tensor:
        if id(tensor) not in self._parts_read:
            return super().operand(tensor, input_placement, contexts)
        if isinstance(input_placement, Sharded):
            return input_placement.own(tensor, self.axis.size, self.axis.rank)
        if input_placement == REPLICATE:  # alike on all ranks, each of which has a share of the gradient
            return with_gradient_times(tensor, 1 / self.axis.size)
        return tensor

    @override
    def on_custom_function(
        self, cls: type[torch.autograd.Function], function: Function, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        if self._is_outer and any(map(_is_sealed, tensors_in((args, kwargs)))):
            args, kwargs = map_tensors(opened, (args, kwargs))
            return map_tensors(sealed, self.on_custom_function(cls, function, args, kwargs))
        if not self._holds(args) and not self._holds(kwargs.values()):
            return function(*args, **kwargs)
        if passes_tensors_on(cls):
            with DisableTorchFunction():
                return self._passed_on(function, args)
        if calls_backward_hooks(cls):
            raise PlanError(
                "a module with register_full_backward_hook got a tensor that is cut along its sequence: its hook would"
                f" see this rank's slice of gradients alone. Register hooks on tensors, or {self.remedy}."
            )
        if is_own(cls.__module__):
            return function(*args, **kwargs)
        with DisableTorchFunction():
            call = TorchCall(function, cls.__name__, args, kwargs)
            return self.execute(call, self._on_whole(call))

    def on_reentrant_checkpoint(self, apply: Function, run: Callable[..., Any], preserves_rng: bool, *args: Any) -> Any:
        """Apply a checkpoint that is an autograd function, which knows local tensors alone.

        Args:
            apply: Applies it.
            run: What it runs, in the forward and again in the backward.
        """
        given: list[Any] = [placement_of(arg) for arg in args]
        made: list[Any] = []

        def on_local(*local: Any) -> Any:
            output = run(*self._wrapped(local, given))
            made[:] = map(placement_of, output if isinstance(output, tuple) else (output,))
            with DisableTorchFunction():
                return _own(output)

        with DisableTorchFunction():
            own = _own(args)
        found = apply(on_local, preserves_rng, *own)
        if isinstance(found, tuple):
            return self._wrapped(found, made)
        return self._wrapped((found,), made)[0]

    def _wrapped(self, local: Iterable[Any], placements: Iterable[Sharded | None]) -> tuple[Any, ...]:
        with DisableTorchFunction():
            pairs = zip(local, placements, strict=True)
            return tuple(own if at is None else ShardedTensor(own, self.axis, at) for own, at in pairs)

    def _passed_on(self, function: Function, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Apply a function of FSDP2, which gives its last arguments with its backward behind them."""
        own = function(*_own(args))
        return self._wrapped(own, map(placement_of, args[-len(own) :]))


class _Shown(tuple[object, ...]):
    """Stands for a tensor where a call is described."""


def _is_sealed(tensor: Tensor) -> bool:
    return isinstance(tensor, SealedTensor)


def _memory(tensor: Tensor) -> int:
    return storage_id(tensor.untyped_storage())


def _own(value: Any) -> Any:
    return map_tensors(lambda tensor: tensor.own() if isinstance(tensor, ShardedTensor) else tensor, value)


def _is_of_weights(tensor: Tensor) -> bool:
    return isinstance(tensor, nn.Parameter) or comes_of_weights(tensor)
