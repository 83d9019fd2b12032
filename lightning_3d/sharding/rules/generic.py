"""Any other call: every rank makes it on its own shards where it has a local form (`local_form`)."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch import Tensor

from lightning_3d.sharding.axis import Axis
from lightning_3d.sharding.placement import (
    REPLICATE_PARTIAL_GRAD,
    InterleavedShard,
    Placement,
    Shard,
    Sharded,
    lengths_of,
)
from lightning_3d.sharding.rules.call import PARTIAL, LocalCall, TorchCall
from lightning_3d.sharding.rules.local_form import LocalForm, Operand, call_locally, local_form, signature
from lightning_3d.sharding.sharded_tensor import placement_of

_OF_ANY_LENGTHS = {
    *("abs", "add", "clamp", "clone", "contiguous", "cos", "div", "exp", "float", "log", "logical_not"),
    *("masked_fill", "mean", "mul", "neg", "pow", "relu", "rsqrt", "sigmoid", "silu", "sin", "softplus", "softmax"),
    *("sqrt", "square", "sub", "sum", "swapaxes", "tanh", "to", "transpose", "true_divide", "unsqueeze", "where"),
    *("add_", "clamp_", "div_", "masked_fill_", "mul_", "sub_"),
}
"""Calls that are decided alike whatever the lengths of dims: no argument names one, and no operator goes by one."""


def generic(call: TorchCall, axis: Axis) -> LocalCall | None:
    """The local form of a call, or None.

    Args:
        call: Some of its tensors are sharded.
        axis: The axis that they are sharded over.
    """
    placements = {placement for tensor in call.tensors if (placement := placement_of(tensor)) is not None}
    alike = {placement.at(0) for placement in placements}  # but for the dim
    form = _looked_up(call, alike.copy().pop(), axis.size) if len(alike) == 1 else None
    if form is None:
        return None
    (lie,), tensors = alike, call.tensors
    input_placements: list[Placement] = []
    for tensor, cut in zip(tensors, form.cuts, strict=True):
        placement = placement_of(tensor)
        if placement is not None:
            input_placements.append(placement)
        else:
            input_placements.append(REPLICATE_PARTIAL_GRAD if cut is None else lie.at(cut))
    run = call.run
    if form.local_shape is not None:
        run = functools.partial(call_locally, call.function, form.local_shape)
    if form.is_mean:
        run = functools.partial(_mean, run, axis.size)
    result = tuple([PARTIAL if dim is None else lie.at(dim) for dim in form.dims])
    return LocalCall(tensors=tensors, input_placements=tuple(input_placements), run=run, result=result)


def _looked_up(call: TorchCall, lie: Sharded, size: int) -> LocalForm | None:
    """The form of a call whose sharded operands lie so, on whatever dims."""
    lengths: dict[int, int] | None = _Renamed(size) if call.name in _OF_ANY_LENGTHS else None
    uneven = None
    if (shards := lengths_of(lie)) is not None:  # decided as for even shards, of another length than any dim has
        uneven = size * max(length for tensor in call.tensors for length in (1, *tensor.shape)) + size
        lengths = _Kept() if lengths is None else lengths
        lengths[sum(shards)] = uneven
    operand = functools.partial(_operand, lengths)
    try:
        args, kwargs = signature(call.args, operand), signature(call.kwargs, operand)
        return local_form(call.function, args, kwargs, size, uneven)
    except TypeError:  # an argument that can't be hashed
        return None


def _operand(lengths: dict[int, int] | None, tensor: Tensor) -> Operand:
    placement = placement_of(tensor)
    shape = tensor.shape if lengths is None else tuple([lengths[length] for length in tensor.shape])
    if isinstance(placement, InterleavedShard):
        return Operand(shape, tensor.dtype, tensor.device, placement.dim, placement.sizes)
    return Operand(shape, tensor.dtype, tensor.device, placement.dim if isinstance(placement, Shard) else None)


class _Kept(dict[int, int]):
    """Lengths of dims as they are, but for those that are given."""

    def __missing__(self, length: int) -> int:
        return length


class _Renamed(dict[int, int]):
    """Lengths of dims in the order of their appearance: two that are equal stay so, as do 0, 1 and what is divisible.

    So calls with ever new lengths, as in a loop over the positions of a chunk, are decided once.
    """

    def __init__(self, size: int) -> None:
        super().__init__({0: 0, 1: 1})
        self._size = size

    def __missing__(self, length: int) -> int:
        self[length] = (len(self) + 1) * self._size + (length % self._size > 0)
        return self[length]


def _mean(run: Callable[..., Any], size: int, *tensors: Tensor) -> Any:
    return run(*tensors) / size
