"""Any other call: every rank makes it on its own shards where it has a local form (`local_form`)."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch import Tensor

from lightning_3d.sharding.axis import Axis
from lightning_3d.sharding.placement import REPLICATE_PARTIAL_GRAD, InterleavedShard, Placement, Shard, in_parts
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
    form, sizes = _looked_up(call, axis.size)
    if form is None:
        return None
    tensors = call.tensors
    input_placements: list[Placement] = []
    for tensor, cut in zip(tensors, form.cuts, strict=True):
        placement = placement_of(tensor)
        if placement is not None:
            input_placements.append(placement)
        else:
            input_placements.append(REPLICATE_PARTIAL_GRAD if cut is None else in_parts(cut, sizes, axis.size))
    run = call.run
    if form.local_shape is not None:
        run = functools.partial(call_locally, call.function, form.local_shape)
    if form.is_mean:
        run = functools.partial(_mean, run, axis.size)
    result = tuple([PARTIAL if dim is None else in_parts(dim, sizes, axis.size) for dim in form.dims])
    return LocalCall(tensors=tensors, input_placements=tuple(input_placements), run=run, result=result)


def _looked_up(call: TorchCall, size: int) -> tuple[LocalForm | None, tuple[int, ...]]:
    """The form, and the sizes of the parts of what is sharded, if it has any."""
    placements = [placement for tensor in call.tensors if (placement := placement_of(tensor)) is not None]
    parts = {placement.sizes if isinstance(placement, InterleavedShard) else () for placement in placements}
    if len(parts) != 1:
        return None, ()
    lengths = _Renamed(size) if call.name in _OF_ANY_LENGTHS else None
    operand = functools.partial(_operand, lengths)
    try:
        args, kwargs = signature(call.args, operand), signature(call.kwargs, operand)
        return local_form(call.function, args, kwargs, size), next(iter(parts))
    except TypeError:  # an argument that can't be hashed
        return None, ()


def _operand(lengths: _Renamed | None, tensor: Tensor) -> Operand:
    placement = placement_of(tensor)
    shape = tensor.shape if lengths is None else tuple([lengths[length] for length in tensor.shape])
    if isinstance(placement, InterleavedShard):
        return Operand(shape, tensor.dtype, tensor.device, placement.dim, placement.sizes)
    return Operand(shape, tensor.dtype, tensor.device, placement.dim if isinstance(placement, Shard) else None)


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
