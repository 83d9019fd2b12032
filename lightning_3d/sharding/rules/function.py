"""Calls in general: their names and tensors, and which run on whole tensors."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from lightning_3d.distributed.replica_world import CHANGING_COLLECTIVE, COLLECTIVE
from lightning_3d.torch_internals.tensors import BASE

Function = Callable[..., Any]

_MAX_NAMES = 4096

_CONCATENATIONS = (torch.cat, torch.concat, torch.concatenate)


def simplified(function: Function, args: tuple[object, ...]) -> tuple[Any, ...]:
    """The arguments of the same call without what torch has no sharded form for.

    ``torch.cat`` gets no tensors of shape (0,), which it ignores whatever the shapes of the others, and as which
    key-value caches begin.
    """
    if function in _CONCATENATIONS and args and isinstance(args[0], list | tuple):
        kept = [tensor for tensor in args[0] if tensor.shape != (0,)]
        return (kept or args[0], *args[1:])
    return args


_RANDOM = frozenset(
    {
        "alpha_dropout",
        "bernoulli",
        "bernoulli_",
        "cauchy_",
        "dropout1d",
        "dropout2d",
        "dropout3d",
        "exponential_",
        "feature_alpha_dropout",
        "feature_dropout",
        "geometric_",
        "gumbel_softmax",
        "log_normal_",
        "multinomial",
        "normal",
        "normal_",
        "poisson",
        "rand_like",
        "randint_like",
        "randn_like",
        "random_",
        "rrelu",
        "uniform_",
    }
)

EXPERTS_MATMULS = frozenset({"grouped_mm", "_grouped_mm", "grouped_mm_fallback"})
"""Names of products per expert."""

_READS_DATA = frozenset(
    {
        "__bool__",
        "__contains__",
        "__float__",
        "__index__",
        "__int__",
        "allclose",
        "argwhere",
        "bincount",
        "equal",
        "item",
        "masked_select",
        "nonzero",
        "numpy",
        "tolist",
        "unique",
        "unique_consecutive",
    }
)
"""Functions whose result, or its shape, depends on data."""

_CHOICES = frozenset(
    {
        *("amax", "amin", "argmax", "argmin", "argsort", "kthvalue", "max", "median", "min", "mode"),
        *("bucketize", "int", "long", "multinomial", "searchsorted", "sort", "topk"),
        *("eq", "ge", "gt", "le", "lt", "ne", "__eq__", "__ne__"),
        *("greater", "greater_equal", "isclose", "less", "less_equal", "not_equal"),
    }
)

DECIDES = _CHOICES | _READS_DATA
"""Calls that choose among floating-point numbers, or make integers, booleans or Python's numbers of them."""

ON_WHOLE = _RANDOM | _READS_DATA | EXPERTS_MATMULS | {COLLECTIVE, CHANGING_COLLECTIVE}
"""Calls that run on full tensors, alike on all ranks, if no rule answers them.

They draw random numbers, and are no dropout; or they read data, communicate, or have no rule for shards.
"""

MEMORY = frozenset(
    {"__cuda_array_interface__", "__dlpack__", "data_ptr", "is_set_to", "storage", "to_dlpack", "untyped_storage"}
)
"""Calls that give the memory itself; that of a gathered copy would be freed at once, or written to in vain."""

METADATA = frozenset(
    {"shape", "size", "dim", "ndim", "ndimension", "numel", "nelement", "dtype", "device", "layout", "requires_grad"}
    | {"is_floating_point", "is_complex", "is_cuda", "is_cpu", "is_meta", "is_sparse", "is_nested", "is_quantized"}
    | {"element_size", "itemsize", "is_leaf", "__len__", BASE}
)
"""Calls that read no more of a tensor than a `ShardedTensor` knows without its data."""


@functools.lru_cache(_MAX_NAMES)
def function_name(function: Function) -> str:
    """A name for messages: ``view``, ``linear``; for a property's getter the name of the property."""
    name = str(getattr(function, "__name__", function))
    owner = getattr(function, "__self__", None)
    return str(getattr(owner, "__name__", name)) if name == "__get__" else name


def tensors_in(value: object) -> list[Tensor]:
    """All tensors in nested tuples, lists and dicts, the arguments or the results of a call."""
    found: list[Tensor] = []
    _collect((value,), found)
    return found


def _collect(values: Iterable[object], found: list[Tensor]) -> None:
    for value in values:
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, tuple | list):
            _collect(value, found)
        elif isinstance(value, dict):
            _collect(value.values(), found)


def map_tensors(change: Callable[[Tensor], Tensor], value: object) -> Any:
    """A copy of nested tuples, lists and dicts with every tensor changed; torch's result types stay what they are."""
    if isinstance(value, Tensor):
        return change(value)
    if type(value) is dict:
        return {key: map_tensors(change, item) for key, item in value.items()}
    if isinstance(value, tuple | list):
        items = [map_tensors(change, item) for item in value]
        if type(value) is tuple:
            return tuple(items)
        make = getattr(type(value), "_make", type(value))  # a namedtuple's constructor takes no iterable
        return make(items)
    return value
