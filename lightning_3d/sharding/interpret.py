"""Answering the calls of user code that have sharded tensors among their arguments.

The one place where [Note: replicated is plain] becomes fact: a rule of the table says how every rank makes a call
(`LocalCall`), and the interpreter makes its operands what they have to be, runs it and wraps the results. Whether
anything is communicated is the axis's affair.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from itertools import repeat
from typing import Any, ClassVar, Generic, TypeVar

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from lightning_3d.activations.collective_mode import unseen_by_checkpoints
from lightning_3d.errors import PlanError
from lightning_3d.model.block_runner import is_own
from lightning_3d.sharding import collectives
from lightning_3d.sharding.axis import Axis
from lightning_3d.sharding.placement import REPLICATE, REPLICATE_PARTIAL_GRAD, Partial, Placement, Replicate, Sharded
from lightning_3d.sharding.rules.call import PARTIAL, InputPlacement, LocalCall, RunningStatistic, TorchCall, on_whole
from lightning_3d.sharding.rules.function import (
    DECIDES,
    MEMORY,
    METADATA,
    ON_WHOLE,
    Function,
    function_name,
    map_tensors,
    simplified,
)
from lightning_3d.sharding.rules.generic import generic
from lightning_3d.sharding.rules.rewritten import rewritten
from lightning_3d.sharding.rules.table import RULES
from lightning_3d.sharding.running_statistics import RunningStatistics
from lightning_3d.sharding.sharded_tensor import UNSEEN, ShardedTensor, shard_dim
from lightning_3d.torch_internals.dispatch import SET_DATA, DisableTorchFunction, function_modes
from lightning_3d.torch_internals.modules import buffers_of
from lightning_3d.torch_internals.pytree import tree_flatten, tree_unflatten
from lightning_3d.torch_internals.tensors import version_of

T = TypeVar("T")

_OF_AUTOGRAD = frozenset({"backward", "register_hook", "retain_grad", "__set__"})
"""Calls that change a tensor's place in the graph."""


class Interpreter(TorchFunctionMode):
    """Active while code runs on shards, such as one forward of one block.

    Args:
        axis: The axis that tensors are sharded over.
        data_dependent_routing: Whether data decides which weights a row meets, or which calls are made. Then what is
            decided on plain tensors is decided on those of the first rank: they are computed on every rank, and kernels
            that add in any order, or that each rank tunes for itself, round differently.
    """

    sees_all = False
    """Whether calls are answered that have no sharded tensor among their arguments, too."""

    shards_weights: ClassVar[bool] = True
    """Whether weights are sharded, too."""

    kinds: ClassVar[tuple[type[Tensor], ...]] = (ShardedTensor,)
    """Classes of the tensors of which a rank has a part."""

    remedy: ClassVar[str] = "run it outside of what is sharded"
    """The end of a message on a call that can't run on shards: what users can do about it."""

    def __init__(self, axis: Axis, *, data_dependent_routing: bool = False) -> None:
        super().__init__()
        self.axis, self._data_dependent_routing = axis, data_dependent_routing
        self.statistics = RunningStatistics(axis)
        """To be entered with this mode."""
        self._entered: ByTensor[Tensor] = ByTensor()

    def __torch_function__(
        self, func: Function, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if self.shards_weights and func == SET_DATA and isinstance(args[0], nn.Parameter):
            raise PlanError("parameter.data = ... inside of a block would change this forward's shard alone: use copy_")
        if not (self.sees_all or self._holds(args) or (kwargs and self._holds(kwargs.values()))):
            if self._data_dependent_routing and function_name(func) in DECIDES:
                args, kwargs = map_tensors(self._of_first_rank, (args, kwargs))
            return func(*args, **kwargs)
        name = function_name(func)
        if name in METADATA:
            return func(*args, **kwargs)
        if (known := rewritten(func, args, kwargs)) is not None:
            with self:
                return known(*args, **kwargs)
        return self.dispatch(TorchCall(func, name, simplified(func, args), kwargs))

    def dispatch(self, call: TorchCall) -> Any:
        """The result of a call, some of whose tensors are sharded."""
        if not any(isinstance(tensor, ShardedTensor) for tensor in call.tensors):
            return self.run_plain(call)
        for rule in RULES.get(call.name, ()):
            if (local := rule(call, self.axis)) is not None:
                return self.execute(call, local)
        return self.execute(call, self._other(call))

    def run_plain(self, call: TorchCall) -> Any:
        """The result of a call without sharded tensors."""
        return call.function(*call.args, **call.kwargs)

    def on_custom_function(
        self, cls: type[torch.autograd.Function], function: Function, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Answer a custom autograd function on whole tensors, as its backward is code of its own; those of torch and of
        this package make and read shards themselves.
        """
        if is_own(cls.__module__) or not (self._holds(args) or self._holds(kwargs.values())):
            return function(*args, **kwargs)
        with DisableTorchFunction():  # this mode included
            call = TorchCall(function, cls.__name__, args, kwargs)
            return self.execute(call, on_whole(call))

    def _other(self, call: TorchCall) -> LocalCall:
        """A call that no rule answers."""
        if call.name in MEMORY:
            raise PlanError(
                f"{call.name} asks for the memory of a tensor of which this rank has a part. Return the tensor from the"
                f" block and ask there, or {self.remedy}."
            )
        changed = call.destination
        is_refused = call.name in ON_WHOLE or (changed is not None and not isinstance(changed, ShardedTensor))
        local = None if is_refused else generic(call, self.axis)
        if local is not None:
            return local
        if changed is None and call.name in _OF_AUTOGRAD:
            changed = call.args[0]
        if isinstance(changed, ShardedTensor):
            self.refuse_change(call, changed)
        return on_whole(call)

    def refuse_change(self, call: TorchCall, tensor: Tensor) -> None:
        """Raise, as a call changes a sharded tensor in place and not every rank can do that on its own shard."""
        raise PlanError(
            f"{call.name} changes a sharded tensor in place, and not every rank can do that on its own shard"
        )

    # -------------------------------------------------------------------------------------------- carrying out

    def execute(self, call: TorchCall, local: LocalCall) -> Any:
        """Make a call as a rule says."""
        own: dict[int, ShardedTensor] = {}  # local tensor by id -> the sharded tensor that it is of
        operands: list[Tensor] = []
        contexts: list[AbstractContextManager[Any]] = []
        for tensor, input_placement in zip(local.tensors, local.input_placements, strict=True):
            operand = self.operand(tensor, input_placement, contexts)
            if isinstance(tensor, ShardedTensor) and operand is tensor.local:
                own[id(operand)] = tensor
            operands.append(operand)
        output = _run(local, operands, contexts) if contexts else local.run(*operands)
        for sharded in own.values():
            sharded.follow_local()
        if type(local.result) is Replicate:
            return self._then(local, output)
        placements = iter(local.result) if isinstance(local.result, tuple) else repeat(local.result)
        offsets = iter(local.offsets)

        def wrapped(result: Tensor) -> Tensor:
            placement, start = next(placements), next(offsets, 0)
            return own[id(result)] if id(result) in own else self.wrap(result, placement, local, start)

        return self._then(local, map_tensors(wrapped, output))

    def _then(self, local: LocalCall, result: Any) -> Any:
        if local.epilogue is None:
            return result
        with self:
            return local.epilogue(result)

    def operand(
        self, tensor: Tensor, input_placement: InputPlacement, contexts: list[AbstractContextManager[Any]]
    ) -> Tensor:
        """An operand as a call needs it."""
        if isinstance(input_placement, Replicate):
            return self.read_by_each(tensor, contexts) if input_placement.sums_gradients else self.whole(tensor)
        if isinstance(input_placement, RunningStatistic):
            return self.statistics.own(tensor, changes=input_placement.changes)
        if isinstance(tensor, ShardedTensor) and tensor.placement == input_placement:
            return tensor.own()
        assert not isinstance(input_placement, Partial)
        if isinstance(tensor, ShardedTensor):
            return self.moved(tensor, input_placement)
        return collectives.redistribute(tensor, self.axis, REPLICATE, input_placement)

    def read_by_each(self, tensor: Tensor, contexts: list[AbstractContextManager[Any]]) -> Tensor:
        """All of a tensor, whose gradient is the sum of what the ranks have; alike for all calls that read it.

        Args:
            contexts: Gets what the calls run in.
        """
        if isinstance(tensor, ShardedTensor):
            return self.moved(tensor, REPLICATE_PARTIAL_GRAD)
        if not tensor.requires_grad or not torch.is_grad_enabled():
            return tensor
        read = partial(collectives.redistribute, tensor, self.axis, REPLICATE, REPLICATE_PARTIAL_GRAD)
        return self._entered.get(tensor, read)

    def whole(self, tensor: Tensor) -> Tensor:
        """A tensor that is sharded in any way as a plain one in its original order; a plain one as it is."""
        return self.moved(tensor, REPLICATE) if isinstance(tensor, ShardedTensor) else tensor

    def moved(self, tensor: ShardedTensor, target: Placement) -> Tensor:
        """This rank's part of a sharded tensor as it lies elsewhere."""
        return collectives.redistribute(tensor.own(), self.axis, tensor.placement, target)

    def gathered(self, output: Any, unused_outputs: frozenset[int]) -> Any:
        """A block's output as plain tensors, but for evenly sharded leaves, by position, that nothing reads."""
        leaves, spec = tree_flatten(output)
        whole: dict[int, Tensor] = {}  # a leaf that stands in several places is gathered once
        for i, leaf in enumerate(leaves):
            if isinstance(leaf, Tensor) and not (i in unused_outputs and shard_dim(leaf) is not None):
                if id(leaf) not in whole:
                    whole[id(leaf)] = self.whole(leaf)
                leaves[i] = whole[id(leaf)]
        return tree_unflatten(leaves, spec)

    def make_buffers_whole(self, modules: Iterable[nn.Module]) -> None:
        """Gather buffers that a block has set to shards: they are state, which any rank may read or save alone."""
        for module in modules:
            buffers = buffers_of(module)
            for name, buffer in buffers.items():
                if isinstance(buffer, ShardedTensor):
                    buffers[name] = self.whole(buffer)

    def wrap(self, result: Tensor, placement: Placement, local: LocalCall, start: int) -> Tensor:
        """The form in which the block's code gets a result of this rank; `start`: where it begins, if it is a piece."""
        if isinstance(placement, Partial):
            return self.sum(result, local)
        if isinstance(placement, Replicate):
            return result
        return self.shard(result, placement, is_weight=local.makes_weight)

    def shard(self, own: Tensor, placement: Sharded, *, is_weight: bool) -> Tensor:
        """A sharded tensor of this rank's part."""
        return ShardedTensor(own, self.axis, placement, is_weight=is_weight)

    def sum(self, summand: Tensor, local: LocalCall) -> Tensor:
        """The sum of what the ranks computed, a fresh result of this call."""
        return collectives.redistribute(summand, self.axis, PARTIAL, REPLICATE)

    def _of_first_rank(self, tensor: Tensor) -> Tensor:
        return collectives.of_first_rank(tensor, self.axis) if tensor.is_floating_point() else tensor

    def _holds(self, values: Any) -> bool:
        """Whether arguments hold a sharded tensor, at most one list deep as torch functions take them."""
        kinds = self.kinds
        for value in values:
            if isinstance(value, kinds):
                return True
            if isinstance(value, (list, tuple)) and any(isinstance(item, kinds) for item in value):
                return True
        return False


def _run(local: LocalCall, operands: Sequence[Tensor], contexts: Sequence[AbstractContextManager[Any]]) -> Any:
    with ExitStack() as stack:
        for context in contexts:
            stack.enter_context(context)
        return local.run(*operands)


class ByTensor(Generic[T]):
    """A cache of values made of tensors: one per tensor, until the tensor is changed in place."""

    def __init__(self) -> None:
        # id -> (the tensor, so that no id is used twice; its version; the value).
        self._made: dict[int, tuple[Tensor, int, T]] = {}

    def get(self, tensor: Tensor, make: Callable[[], T]) -> T:
        """The cached value; made now if the tensor is new or changed."""
        known = self._made.get(id(tensor))
        if known is None or known[1] != version_of(tensor):
            with unseen_by_checkpoints():
                known = (tensor, version_of(tensor), make())
            self._made[id(tensor)] = known
        return known[2]


def _after_block(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if any(isinstance(mode, Interpreter) for mode in function_modes()):
        raise PlanError(f"{UNSEEN} ({operator})")
    axis = next(tensor.axis for tensor in tree_flatten((args, kwargs))[0] if isinstance(tensor, ShardedTensor))
    return Interpreter(axis).dispatch(TorchCall(operator, operator.overloadpacket.__name__, args, kwargs))


ShardedTensor.answer_after_block = _after_block
