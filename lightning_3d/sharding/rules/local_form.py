"""Which calls every rank can make on its own shards: decided once per signature of a call, on fake tensors.

A call has a local form if DTensor's rules (`dtensor.py`) run each aten op of it without communication and give
evenly sharded results, or sums whose parts lie on the ranks: then what the ranks compute makes up what one process
computes.

Operands that are replicated are either whole on every rank or cut as the sharded ones are.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_3d.sharding.placement import with_length
from lightning_3d.sharding.rules.function import Function, tensors_in
from lightning_3d.sharding.rules.watched_ops import WatchedOps
from lightning_3d.torch_internals.dispatch import no_dispatch_modes
from lightning_3d.torch_internals.dtensor import NoRule, ShardingRules
from lightning_3d.torch_internals.fake_tensors import FakeTensorMode, on_fake_tensors
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


class Constant(NamedTuple):
    """A value with its class, as True is 1 in Python: ``x[True]`` is not ``x[1]``."""

    kind: type
    value: Any


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


def call_locally(function: Function, local_shape: tuple[int, ...], local: Tensor) -> Any:
    """A call that is told the full shape, on a shard."""
    return _WITH_SHAPE[function](local, local_shape)


def signature(value: object, operand: Callable[[Tensor], Operand]) -> Any:
    """Arguments of a call as one hashable value."""
    if isinstance(value, Tensor):
        return operand(value)
    if isinstance(value, slice):
        return Slice(*(Constant(type(item), item) for item in (value.start, value.stop, value.step)))
    if isinstance(value, tuple):
        return tuple([signature(item, operand) for item in value])
    if isinstance(value, list):
        return Items(tuple([signature(item, operand) for item in value]))
    if isinstance(value, dict):
        return Entries(tuple([(key, signature(item, operand)) for key, item in value.items()]))
    return Constant(type(value), value)


@functools.lru_cache(_MAX_SIGNATURES)
def local_form(
    function: Function, args: object, kwargs: object, size: int, uneven: int | None = None
) -> LocalForm | None:
    """Decide for one signature.

    Args:
        function: The called function.
        args: Signature of its positional arguments.
        kwargs: Signature of its keyword arguments.
        size: Length of the axis.
        uneven: The length of a dim whose shards are unequal, as of equal ones; None if they are equal.

    Returns:
        None if the call has no local form.
    """
    # Outside of whatever modes the caller has set; inference mode hides what a call consists of.
    with no_dispatch_modes(), torch.inference_mode(False), torch.no_grad():
        rules = _rules(size)
        try:
            with on_fake_tensors(FakeTensorMode(allow_non_fake_inputs=True)):
                return _decide(function, args, kwargs, rules, size, uneven)
        except torch.OutOfMemoryError:
            raise
        except Exception:  # whatever the call raises on fake tensors, DTensor or the call itself then says why
            return None


_rules = functools.cache(ShardingRules)


def _decide(
    function: Function, args: object, kwargs: object, rules: ShardingRules, size: int, uneven: int | None
) -> LocalForm:
    operands = list(_operands((args, kwargs)))
    fakes = [_fake(operand.shape, operand) for operand in operands]
    has_parts = any(operand.sizes is not None for operand in operands)
    watch = WatchedOps(rules, [(f, o.dim) for f, o in zip(fakes, operands, strict=True)], size, has_parts=has_parts)
    full_args, full_kwargs = _arguments((args, kwargs), iter(fakes))
    lie = [_geometry(fake) for fake in fakes]
    with watch:
        output = function(*full_args, **full_kwargs)
    if [_geometry(fake) for fake in fakes] != lie:
        raise NoRule("it gives an operand another shape in place")
    outputs = [leaf for leaf in tree_leaves(output) if leaf is not None]
    if not outputs and function is not Tensor.__setitem__:
        raise NoRule("no result")
    dims = tuple(watch.dim(leaf) for leaf in outputs)
    own_shapes = [_own_shape(leaf.shape, dim, size) for leaf, dim in zip(outputs, dims, strict=True)]
    cuts = tuple(watch.cut(fake) for fake in fakes)
    local_shape = own_shapes[0] if function in _WITH_SHAPE and not _is_bit_cast(args) else None
    form = LocalForm(cuts=cuts, local_shape=local_shape, dims=dims, is_mean=watch.is_mean(outputs))
    results = _call_on_shards(function, args, kwargs, _shards(operands, form, size), form)
    if [tuple(tensor.shape) for tensor in results] != own_shapes:
        raise NoRule("its result on shards is not the shard of its result")
    if uneven is not None:
        lengths = {leaf.shape[dim] for leaf, dim in zip(outputs, dims, strict=True) if dim is not None}
        if local_shape is not None or form.is_mean or lengths - {uneven}:
            raise NoRule("what it gives depends on the lengths of shards")
    return form


def _shards(operands: Sequence[Operand], form: LocalForm, size: int) -> list[Tensor]:
    dims = [cut if operand.dim is None else operand.dim for operand, cut in zip(operands, form.cuts, strict=True)]
    pairs = zip(operands, dims, strict=True)
    return [_fake(_own_shape(operand.shape, dim, size), operand) for operand, dim in pairs]


def _call_on_shards(
    function: Function, args: object, kwargs: object, shards: Sequence[Tensor], form: LocalForm
) -> list[Tensor]:
    local_args, local_kwargs = _arguments((args, kwargs), iter(shards))
    if form.local_shape is None:
        return tensors_in(function(*local_args, **local_kwargs))
    return tensors_in(call_locally(function, form.local_shape, local_args[0]))


def _is_bit_cast(args: Any) -> bool:
    """Whether a call of ``view`` changes the dtype."""
    return len(args) == 2 and isinstance(args[1].value if isinstance(args[1], Constant) else None, torch.dtype)


def _operands(value: object) -> Iterator[Operand]:
    if isinstance(value, Operand):
        yield value
    elif isinstance(value, tuple):
        for item in value:
            yield from _operands(item)


def _arguments(value: object, tensors: Iterator[Tensor]) -> Any:
    """The arguments that a signature describes, with tensors in place of operands."""
    if isinstance(value, Operand):
        return next(tensors)
    if isinstance(value, Constant):
        return value.value
    if isinstance(value, Slice):
        return slice(*(item.value for item in value))
    if isinstance(value, Items):
        return [_arguments(item, tensors) for item in value.items]
    if isinstance(value, Entries):
        return {key: _arguments(item, tensors) for key, item in value.items}
    if isinstance(value, tuple):
        return tuple([_arguments(item, tensors) for item in value])
    return value


def _fake(shape: Sequence[int], operand: Operand) -> Tensor:
    return torch.empty(shape, dtype=operand.dtype, device=operand.device)


def _geometry(tensor: Tensor) -> object:
    return tensor.shape, tensor.stride()


def _own_shape(shape: Sequence[int], dim: int | None, size: int) -> tuple[int, ...]:
    if dim is None:
        return tuple(shape)
    return with_length(shape, dim, shape[dim] // size)
