"""Which calls on sharded activations every rank makes on its own shards, without DTensor.

A call has a local form if DTensor's own rules (`rules`) run each aten op of it without communication and give evenly
sharded results, so the concatenation of what the ranks compute is what one process computes. That is looked up once
per signature of a call, on fake tensors; all other calls are left to DTensor.

Operands that are replicated are either whole on every rank or cut as the sharded ones are. Of a whole one each rank has
a part of the gradient, and `crossing` sums it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import Placement, Replicate, Shard

from lightning_3d.tensor.rules.function import Function, tensors_in
from lightning_3d.torch_internals.dtensor_rules import NoRule, ShardingRules
from lightning_3d.torch_internals.fake_tensors import FakeTensorMode
from lightning_3d.torch_internals.modes import TorchDispatchMode
from lightning_3d.torch_internals.operators import OpOverload
from lightning_3d.torch_internals.pytree import tree_leaves

_MAX_SIGNATURES = 8192
"""Decisions that are kept; inputs of ever new lengths make ever new ones."""

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
    """What the decision reads of a tensor argument."""

    shape: tuple[int, ...]
    """Of the full tensor."""

    dtype: torch.dtype
    device: torch.device

    dim: int | None
    """The dim that it is sharded on; None if it is replicated."""


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
    """Of the result, for a call that is told the full shape."""

    dims: tuple[int, ...]
    """By tensor of the result: the dim that it is sharded on."""


def call_locally(
    function: Function, args: Sequence[Any], kwargs: Mapping[str, Any], local_shape: tuple[int, ...] | None
) -> Any:
    """Make a call on shards."""
    if local_shape is not None:
        return _WITH_SHAPE[function](args[0], local_shape)
    return function(*args, **kwargs)


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
def local_form(function: Function, args: Any, kwargs: Any, size: int) -> LocalForm | None:
    """Decide for one signature.

    Args:
        function: What is called.
        args: Signature of its positional arguments.
        kwargs: Signature of its keyword arguments.
        size: Length of the tp axis.

    Returns:
        None if the call has no local form.
    """
    rules = ShardingRules(size)
    # Outside inference mode, which hides what a call consists of.
    with torch.inference_mode(False), torch.no_grad(), FakeTensorMode(allow_non_fake_inputs=True):
        try:
            return _decide(function, args, kwargs, rules, size)
        except torch.OutOfMemoryError:
            raise
        except Exception:  # whatever the call raises on fake tensors, DTensor or the call itself then says why
            return None


def _decide(function: Function, args: Any, kwargs: Any, rules: ShardingRules, size: int) -> LocalForm:
    operands = list(_operands((args, kwargs)))
    fakes = [_fake(operand.shape, operand) for operand in operands]
    watch = _WatchOps(rules, [(f, o.dim) for f, o in zip(fakes, operands, strict=True)], size)
    full_args, full_kwargs = _arguments((args, kwargs), iter(fakes))
    with watch:
        output = function(*full_args, **full_kwargs)
    outputs = [leaf for leaf in tree_leaves(output) if leaf is not None]
    if not outputs and function is not Tensor.__setitem__:
        raise NoRule("no result")
    dims = tuple(watch.dim(leaf) for leaf in outputs)
    own_shapes = [_own_shape(leaf.shape, dim, size) for leaf, dim in zip(outputs, dims, strict=True)]
    cuts = tuple(watch.cut(fake) for fake in fakes)
    local_shape = own_shapes[0] if function in _WITH_SHAPE and not _is_bit_cast(args) else None
    form = LocalForm(cuts=cuts, local_shape=local_shape, dims=dims)
    if _shapes_on_shards(function, args, kwargs, operands, form, size) != own_shapes:
        raise NoRule("its result on shards is not the shard of its result")
    return form


def _shapes_on_shards(
    function: Function, args: Any, kwargs: Any, operands: Sequence[Operand], form: LocalForm, size: int
) -> list[tuple[int, ...]]:
    shards = []
    for operand, cut in zip(operands, form.cuts, strict=True):
        dim = cut if operand.dim is None else operand.dim
        shards.append(_fake(operand.shape if dim is None else _own_shape(operand.shape, dim, size), operand))
    local_args, local_kwargs = _arguments((args, kwargs), iter(shards))
    output = call_locally(function, local_args, local_kwargs, form.local_shape)
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


def _own_shape(shape: Sequence[int], dim: int, size: int) -> tuple[int, ...]:
    return (*shape[:dim], shape[dim] // size, *shape[dim + 1 :])


class _WatchOps(TorchDispatchMode):
    """Follows placements through the aten ops of a call; raises `NoRule` at the first that is not local.

    Args:
        rules: DTensor's.
        operands: The full fake arguments, and the dim that each is sharded on.
        size: Length of the tp axis.
    """

    def __init__(self, rules: ShardingRules, operands: Sequence[tuple[Tensor, int | None]], size: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch 2.13
        self._rules = rules
        self._size = size
        self._kept: list[Tensor] = [tensor for tensor, _ in operands]  # so that no id is used twice
        self._dims = {id(tensor): dim for tensor, dim in operands if dim is not None}
        self._cuts: dict[int, set[int | None]] = {id(tensor): set() for tensor, dim in operands if dim is None}

    def dim(self, leaf: object) -> int:
        """The sharded dim of a result."""
        dim = self._dims.get(id(leaf))
        if dim is None:
            raise NoRule(f"the result {leaf} is not sharded")
        return dim

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
        placements: Sequence[Placement | None] = ()
        if any(id(tensor) in self._dims for tensor in tensors):
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
        return output

    def _placement(self, tensor: Tensor) -> Placement:
        dim = self._dims.get(id(tensor))
        return Replicate() if dim is None else Shard(dim)

    def _cut_of(self, tensor: Tensor, target: Placement) -> int:
        if id(tensor) not in self._cuts or type(target) is not Shard or tensor.shape[target.dim] % self._size:
            raise NoRule("an operand needs communication")
        return target.dim

    def _enter(self, tensor: Tensor, placement: Placement | None) -> None:
        if type(placement) is not Shard or tensor.shape[placement.dim] % self._size:
            raise NoRule(f"a result is {placement}")
        self._kept.append(tensor)
        self._dims[id(tensor)] = placement.dim
