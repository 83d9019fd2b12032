"""Any other call: every rank makes it on its own shards where DTensor's rules say that this is right.

A call has a local form if these rules (`dtensor_rules`) run each aten op of it without communication and give evenly
sharded results, or sums whose parts lie on the ranks: then what the ranks compute makes up what one process computes.
That is looked up once per signature of a call, on fake tensors. Custom autograd functions are looked up forward and
backward, as their backward is code of its own. All other calls are made on whole tensors.

Operands that are replicated are either whole on every rank or cut as the sharded ones are.

A dim in parts (`placement`) is sharded evenly, but in another order. So ops that keep its elements apart (pointwise
ones, reductions and products over other dims) are as local as elsewhere; those that read positions along it are not.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import Partial, Replicate
from torch.distributed.tensor import Placement as DTensorPlacement
from torch.distributed.tensor import Shard as DTensorShard

from lightning_3d.tensor.axis import Axis
from lightning_3d.tensor.placement import EACH, Parts, Placement, Shard
from lightning_3d.tensor.rules.call import PARTIAL, Call, LocalCall
from lightning_3d.tensor.rules.function import Function, tensors_in
from lightning_3d.tensor.sharded_tensor import placement_of
from lightning_3d.torch_internals.dtensor_parts import StridedShard
from lightning_3d.torch_internals.dtensor_rules import NoRule, ShardingRules
from lightning_3d.torch_internals.fake_tensors import FakeTensorMode
from lightning_3d.torch_internals.modes import TorchDispatchMode, no_dispatch_modes
from lightning_3d.torch_internals.operators import (
    FUSED_RMS_NORM,
    LOG_SOFTMAX,
    RESHAPE_ALIAS,
    SOFTMAX,
    TO_COPY,
    UNSAFE_VIEW,
    OpOverload,
)
from lightning_3d.torch_internals.pytree import tree_leaves

_MAX_SIGNATURES = 8192
"""Greatest number of cached decisions; inputs of ever new lengths make ever new ones."""

# Calls that are told the full shape -> the call that gets the shape of the shard.
_WITH_SHAPE: Mapping[Function, Callable[[Tensor, Sequence[int]], Tensor]] = {
    Tensor.view: Tensor.view,
    Tensor.reshape: Tensor.reshape,
    torch.reshape: torch.reshape,
    Tensor.unflatten: Tensor.view,
    torch.unflatten: Tensor.view,
    Tensor.expand: Tensor.expand,
    Tensor.broadcast_to: Tensor.expand,
    torch.broadcast_to: Tensor.expand,
}


class Operand(NamedTuple):
    """The properties of a tensor argument that the decision depends on."""

    shape: tuple[int, ...]
    """The shape of the full tensor."""

    dtype: torch.dtype
    device: torch.device

    dim: int | None
    """The dim that it is sharded on; None if it is replicated."""

    sizes: tuple[int, ...] | None = None
    """The sizes of the parts of that dim, if it has parts."""


class Slice(NamedTuple):
    """A hashable ``slice``."""

    start: Any
    stop: Any
    step: Any


class Items(NamedTuple):
    """A hashable list, which as an index means something else than a tuple."""

    items: tuple[Any, ...]


class Entries(NamedTuple):
    """A hashable dict."""

    items: tuple[tuple[Any, Any], ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class LocalForm:
    """How a rank makes a call on its own shards."""

    cuts: tuple[int | None, ...]
    """By tensor argument: the dim along which a replicated one is cut first; None: used as it is."""

    local_shape: tuple[int, ...] | None
    """The shape of the local result, for a call that is told the full shape."""

    dims: tuple[int | None, ...]
    """By tensor of the result: the dim that it is sharded on; None for a sum whose parts lie on the ranks."""

    is_mean: bool = False
    """Whether these sums are means of what the ranks have."""


def generic(call: Call, axis: Axis, *, differentiates: bool = False) -> LocalCall | None:
    """The local form of a call, or None.

    Args:
        call: Some of its tensors are sharded.
        axis: That they are sharded over.
        differentiates: Whether its backward is looked up, too.
    """
    form, sizes = _looked_up(call, axis.size, differentiates=differentiates)
    if form is None:
        return None
    tensors = call.tensors
    needs: list[Placement] = []
    for tensor, cut in zip(tensors, form.cuts, strict=True):
        placement = placement_of(tensor)
        if isinstance(placement, Shard | Parts):
            needs.append(placement)
        else:
            needs.append(EACH if cut is None else _at(cut, sizes, axis.size))
    run = call.run
    if form.local_shape is not None:
        run = functools.partial(call_locally, call.function, form.local_shape)
    if form.is_mean:
        run = functools.partial(_mean, run, axis.size)
    result = tuple([PARTIAL if dim is None else _at(dim, sizes, axis.size) for dim in form.dims])
    return LocalCall(tensors=tensors, needs=tuple(needs), run=run, result=result)


def _looked_up(call: Call, size: int, *, differentiates: bool) -> tuple[LocalForm | None, tuple[int, ...] | None]:
    """The form, and the sizes of the parts of what is sharded."""
    placements = [placement for tensor in call.tensors if (placement := placement_of(tensor)) is not None]
    parts = {placement.sizes if isinstance(placement, Parts) else None for placement in placements}
    if len(parts) != 1:
        return None, None
    try:
        args, kwargs = signature(call.args, _operand), signature(dict(call.kwargs), _operand)
        return local_form(call.function, args, kwargs, size, differentiates), next(iter(parts))
    except TypeError:  # an argument that can't be hashed
        return None, None


def _operand(tensor: Tensor) -> Operand:
    placement = placement_of(tensor)
    if isinstance(placement, Parts):
        return Operand(tensor.shape, tensor.dtype, tensor.device, placement.dim, placement.sizes)
    return Operand(tensor.shape, tensor.dtype, tensor.device, placement.dim if isinstance(placement, Shard) else None)


def custom(call: Call, axis: Axis) -> LocalCall | None:
    """The local form of a custom autograd function, whose backward is checked as its forward is, or None."""
    return generic(call, axis, differentiates=True)


def _at(dim: int, sizes: tuple[int, ...] | None, size: int) -> Shard | Parts:
    return Shard(dim) if sizes is None else Parts(dim=dim, sizes=sizes, num_ranks=size)


def _mean(run: Callable[..., Any], size: int, *tensors: Tensor) -> Any:
    return run(*tensors) / size


def call_locally(function: Function, local_shape: tuple[int, ...], local: Tensor) -> Any:
    """A call that is told the full shape, on a shard."""
    return _WITH_SHAPE[function](local, local_shape)


def signature(value: Any, operand: Callable[[Tensor], Operand]) -> Any:
    """Arguments of a call as one hashable value."""
    if isinstance(value, Tensor):
        return operand(value)
    if isinstance(value, slice):
        return Slice(value.start, value.stop, value.step)
    if isinstance(value, tuple):
        return tuple([signature(item, operand) for item in value])
    if isinstance(value, list):
        return Items(tuple([signature(item, operand) for item in value]))
    if isinstance(value, dict):
        return Entries(tuple([(key, signature(item, operand)) for key, item in value.items()]))
    return value


@functools.lru_cache(_MAX_SIGNATURES)
def local_form(function: Function, args: Any, kwargs: Any, size: int, differentiates: bool = False) -> LocalForm | None:
    """Decide for one signature.

    Args:
        function: What is called.
        args: Signature of its positional arguments.
        kwargs: Signature of its keyword arguments.
        size: Length of the axis.
        differentiates: Whether it has a backward of its own, which is looked up, too.

    Returns:
        None if the call has no local form.
    """
    # Outside of whatever modes the caller has set; inference mode hides what a call consists of.
    with no_dispatch_modes(), torch.inference_mode(False), torch.set_grad_enabled(differentiates):
        rules = ShardingRules(size)
        try:
            with FakeTensorMode(allow_non_fake_inputs=True):
                return _decide(function, args, kwargs, rules, size, differentiates=differentiates)
        except torch.OutOfMemoryError:
            raise
        except Exception:  # whatever the call raises on fake tensors, DTensor or the call itself then says why
            return None


def _decide(
    function: Function, args: Any, kwargs: Any, rules: ShardingRules, size: int, *, differentiates: bool
) -> LocalForm:
    operands = list(_operands((args, kwargs)))
    fakes = [_fake(operand.shape, operand) for operand in operands]
    has_parts = any(operand.sizes is not None for operand in operands)
    watch = _WatchOps(rules, [(f, o.dim) for f, o in zip(fakes, operands, strict=True)], size, has_parts=has_parts)
    full_args, full_kwargs = _arguments((args, kwargs), iter(fakes))
    if differentiates:
        fakes = [fake.requires_grad_(fake.is_floating_point()) for fake in fakes]
    with watch:
        output = function(*full_args, **full_kwargs)
    outputs = [leaf for leaf in tree_leaves(output) if leaf is not None]
    if not outputs and function is not Tensor.__setitem__:
        raise NoRule("no result")
    dims = tuple(watch.dim(leaf) for leaf in outputs)
    own_shapes = [_own_shape(leaf.shape, dim, size) for leaf, dim in zip(outputs, dims, strict=True)]
    if differentiates:
        _differentiate(watch, fakes, outputs)
    cuts = tuple(watch.cut(fake) for fake in fakes)
    local_shape = own_shapes[0] if function in _WITH_SHAPE and not _is_bit_cast(args) else None
    form = LocalForm(cuts=cuts, local_shape=local_shape, dims=dims, is_mean=watch.is_mean(outputs))
    if _shapes_on_shards(function, args, kwargs, operands, form, size) != own_shapes:
        raise NoRule("its result on shards is not the shard of its result")
    return form


def _differentiate(watch: _WatchOps, operands: Sequence[Tensor], outputs: Sequence[Any]) -> None:
    """Raise `NoRule` unless the backward gives every operand the gradient that its placement asks for."""
    results = [leaf for leaf in outputs if isinstance(leaf, Tensor) and leaf.requires_grad]
    differentiable = [operand for operand in operands if operand.requires_grad]
    if not results or not differentiable:
        return
    ones = [torch.ones_like(result) for result in results]
    for gradient, result in zip(ones, results, strict=True):
        watch.place_alike(gradient, result)
    with watch:
        gradients = torch.autograd.grad(results, differentiable, ones, allow_unused=True)
    for operand, found in zip(differentiable, gradients, strict=True):
        if found is not None:
            watch.check_gradient(operand, found)


def _shapes_on_shards(
    function: Function, args: Any, kwargs: Any, operands: Sequence[Operand], form: LocalForm, size: int
) -> list[tuple[int, ...]]:
    shards = []
    for operand, cut in zip(operands, form.cuts, strict=True):
        dim = cut if operand.dim is None else operand.dim
        shards.append(_fake(operand.shape if dim is None else _own_shape(operand.shape, dim, size), operand))
    local_args, local_kwargs = _arguments((args, kwargs), iter(shards))
    if form.local_shape is None:
        output = function(*local_args, **local_kwargs)
    else:
        output = call_locally(function, form.local_shape, local_args[0])
    return [tuple(tensor.shape) for tensor in tensors_in(output)]


def _is_bit_cast(args: Any) -> bool:
    """Whether a call of ``view`` changes the dtype."""
    return len(args) == 2 and isinstance(args[1], torch.dtype)


def _operands(value: Any) -> Iterator[Operand]:
    if isinstance(value, Operand):
        yield value
    elif isinstance(value, tuple):
        for item in value:
            yield from _operands(item)


def _arguments(value: Any, tensors: Iterator[Tensor]) -> Any:
    """The arguments that a signature describes, with tensors in place of operands."""
    if isinstance(value, Operand):
        return next(tensors)
    if isinstance(value, Slice):
        return slice(*value)
    if isinstance(value, Items):
        return [_arguments(item, tensors) for item in value.items]
    if isinstance(value, Entries):
        return {key: _arguments(item, tensors) for key, item in value.items}
    if isinstance(value, tuple):
        return tuple([_arguments(item, tensors) for item in value])
    return value


def _fake(shape: Sequence[int], operand: Operand) -> Tensor:
    return torch.empty(shape, dtype=operand.dtype, device=operand.device)


def _own_shape(shape: Sequence[int], dim: int | None, size: int) -> tuple[int, ...]:
    if dim is None:
        return tuple(shape)
    return (*shape[:dim], shape[dim] // size, *shape[dim + 1 :])


_aten = torch.ops.aten

_KEEP_APART = frozenset(
    {
        *(_aten.clone, _aten.detach, _aten.alias, _aten.permute, _aten.transpose, _aten.t, _aten.unsqueeze),
        *(_aten.squeeze, _aten.expand, _aten.slice, _aten.select, _aten.cat, _aten.stack, _aten.cumsum, _aten.sum),
        *(_aten.mean, _aten.amax, _aten.amin, _aten.mm, _aten.bmm, _aten.baddbmm, _aten.addmm, _aten.gather),
        *(_aten.index_select, _aten.masked_fill_, _aten.native_layer_norm, _aten.var_mean, _aten.where, _aten.fill_),
        _aten.copy_,
        *(op.overloadpacket for op in (TO_COPY, SOFTMAX, LOG_SOFTMAX, FUSED_RMS_NORM)),
    }
)
"""Besides pointwise ops those that treat the elements of a dim alike wherever DTensor lets it be sharded."""

_VIEWS = frozenset({_aten.view, UNSAFE_VIEW.overloadpacket, _aten.reshape, RESHAPE_ALIAS.overloadpacket})


class _WatchOps(TorchDispatchMode):
    """Follows placements through the aten ops of a call; raises `NoRule` at the first that is not local.

    Args:
        rules: DTensor's.
        operands: The full fake arguments, and the dim that each is sharded on.
        size: Length of the axis.
        has_parts: Whether these dims have parts.
    """

    def __init__(
        self, rules: ShardingRules, operands: Sequence[tuple[Tensor, int | None]], size: int, *, has_parts: bool
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch 2.13
        self._rules, self._size, self._has_parts = rules, size, has_parts
        self._kept: list[Tensor] = [tensor for tensor, _ in operands]  # so that no id is used twice
        self._dims = {id(tensor): dim for tensor, dim in operands if dim is not None}
        self._strided: dict[int, DTensorPlacement] = {}
        self._sums: dict[int, str] = {}  # parts of which lie on the ranks: "sum" or "avg"
        self._cuts: dict[int, set[int | None]] = {id(tensor): set() for tensor, dim in operands if dim is None}

    def dim(self, leaf: object) -> int | None:
        """The sharded dim of a result; None for a sum."""
        dim = self._dims.get(id(leaf))
        if dim is None and id(leaf) not in self._sums:
            raise NoRule(f"the result {leaf} is not sharded")
        return dim

    def is_mean(self, leaves: Sequence[object]) -> bool:
        """Whether results are means of what the ranks have."""
        kinds = {self._sums.get(id(leaf)) for leaf in leaves}
        if len(kinds) > 1:
            raise NoRule("sums beside means or shards")
        return kinds == {"avg"}

    def place_alike(self, gradient: Tensor, result: Tensor) -> None:
        """Let the gradient of a result be sharded as it is; that of a sum is whole."""
        self._kept.append(gradient)
        if id(result) in self._dims:
            self._dims[id(gradient)] = self._dims[id(result)]

    def check_gradient(self, operand: Tensor, gradient: Tensor) -> None:
        """Raise `NoRule` unless a gradient is sharded as its operand; that of a whole one is the sum of the ranks'."""
        dim = self._dims.get(id(operand), self.cut(operand))
        if self._dims.get(id(gradient)) != dim or (dim is None and self._sums.get(id(gradient)) != "sum"):
            raise NoRule("a gradient is not sharded as its operand")

    def cut(self, operand: Tensor) -> int | None:
        """The dim along which an operand is cut."""
        cuts = self._cuts.get(id(operand), set())
        if len(cuts) > 1:
            raise NoRule("a replicated operand is used whole and cut")
        return next(iter(cuts), None)

    def __torch_dispatch__(
        self, func: OpOverload, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        if func.namespace == "prim":
            return func(*args, **kwargs)
        moved: dict[int, int] = {}
        placements: Sequence[DTensorPlacement | None] = ()
        if any(id(tensor) in self._sums for tensor in tensors):
            return self._view_of_sum(func, tensors, args, kwargs)
        if any(id(tensor) in self._dims or id(tensor) in self._strided for tensor in tensors):
            propagation = self._rules.propagate(func, args, kwargs, self._placement)
            moved = {id(move.tensor): self._cut_of(move.tensor, move.target) for move in propagation.moves}
            placements = propagation.outputs
        for tensor in tensors:
            if id(tensor) in self._cuts:
                self._cuts[id(tensor)].add(moved.get(id(tensor)))
        output = func(*args, **kwargs)
        leaves = tree_leaves(output)
        if not tensors and any(isinstance(leaf, Tensor) and leaf.dim() for leaf in leaves):
            raise NoRule(f"{func} makes a tensor that may depend on sizes")
        for leaf, placement in zip(leaves, placements, strict=bool(placements)):
            if isinstance(leaf, Tensor):
                self._enter(leaf, placement)
        if placements and self._has_parts:
            self._check_order(func, tensors, leaves)
        return output

    def _view_of_sum(self, func: OpOverload, tensors: Sequence[Tensor], args: Any, kwargs: Any) -> Any:
        if func.overloadpacket not in _VIEWS or len(tensors) > 1:
            raise NoRule(f"{func} reads a sum that is not made yet")
        output = func(*args, **kwargs)
        self._kept.append(output)
        self._sums[id(output)] = self._sums[id(tensors[0])]
        return output

    def _placement(self, tensor: Tensor) -> DTensorPlacement:
        if id(tensor) in self._strided:
            return self._strided[id(tensor)]
        dim = self._dims.get(id(tensor))
        return Replicate() if dim is None else DTensorShard(dim)

    def _cut_of(self, tensor: Tensor, target: DTensorPlacement) -> int:
        if id(tensor) not in self._cuts or type(target) is not DTensorShard:
            raise NoRule("an operand needs communication")
        if tensor.shape[target.dim] % self._size:
            raise NoRule("an operand can't be cut evenly")
        return target.dim

    def _enter(self, tensor: Tensor, placement: DTensorPlacement | None) -> None:
        self._kept.append(tensor)
        if type(placement) is Partial and placement.reduce_op in ("sum", "avg") and tensor.is_floating_point():
            self._sums[id(tensor)] = placement.reduce_op
        elif type(placement) is DTensorShard and tensor.shape[placement.dim] % self._size == 0:
            self._dims[id(tensor)] = placement.dim
        elif isinstance(placement, StridedShard):  # a sharded dim was flattened into one before it, for now
            self._strided[id(tensor)] = placement
        else:
            raise NoRule(f"a result is {placement}")

    def _check_order(self, func: OpOverload, tensors: Sequence[Tensor], results: Sequence[Any]) -> None:
        """Refuse ops that read positions along a dim with parts."""
        if torch.Tag.pointwise in func.tags or func.overloadpacket in _KEEP_APART:
            return
        before = {_place(tensor.shape, self._dims[id(tensor)]) for tensor in tensors if id(tensor) in self._dims}
        after = {_place(leaf.shape, self._dims[id(leaf)]) for leaf in results if id(leaf) in self._dims}
        if func.overloadpacket not in _VIEWS or before != after:
            raise NoRule(f"{func} may read positions along a dim in parts")


def _place(shape: Sequence[int], dim: int) -> tuple[int, int]:
    """Numbers that a view keeps for a dim that it leaves alone."""
    return math.prod(shape[:dim]), shape[dim]
