"""Any other call: every rank makes it on its own shards where it has a local form (`local_form`)."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from lightning_3d.sharding.axis import Axis
from lightning_3d.sharding.placement import (
    REPLICATE_PARTIAL_GRAD,
    InterleavedShard,
    Placement,
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


Lies = Mapping[int, Sharded]
"""By the id of a sharded tensor: its placement."""


def generic(call: TorchCall, axis: Axis) -> LocalCall | None:
    """The local form of a call, or None: with its operands as they lie, else with all where the largest lies.

    Args:
        call: Some of its tensors are sharded.
        axis: The axis that they are sharded over.
    """
    lies = {id(tensor): at for tensor in call.tensors if (at := placement_of(tensor)) is not None}
    if (local := _local(call, lies, axis)) is not None:
        return local
    alike = _alike(call, lies)
    return None if alike == lies else _local(call, alike, axis)


def _alike(call: TorchCall, lies: Lies) -> Lies:
    """The placements of operands if all lie as the largest does, or the one that is changed in place."""
    sharded = [tensor for tensor in call.tensors if id(tensor) in lies]
    kept = call.destination if id(call.destination) in lies else max(sharded, key=Tensor.numel)
    assert kept is not None
    at = lies[id(kept)]
    same = {id(tensor) for tensor in sharded if tensor.dim() == kept.dim() and tensor.shape == kept.shape}
    return {known: at if known in same else lie for known, lie in lies.items()}


def _local(call: TorchCall, lies: Lies, axis: Axis) -> LocalCall | None:
    kinds = set(lies.values())
    kinds = kinds if len(kinds) == 1 else {at.at(0) for at in kinds}  # alike but for the dim
    form = _looked_up(call, lies, next(iter(kinds)), axis.size) if len(kinds) == 1 else None
    if form is None:
        return None
    (kind,), tensors = kinds, call.tensors
    input_placements: list[Placement] = []
    for tensor, cut in zip(tensors, form.cuts, strict=True):
        whole = REPLICATE_PARTIAL_GRAD if cut is None else kind.at(cut)
        input_placements.append(lies.get(id(tensor), whole))
    run = call.run
    if form.local_shape is not None:
        run = functools.partial(call_locally, call.function, form.local_shape)
    if form.is_mean:
        run = functools.partial(_mean, run, axis.size)
    result = tuple([PARTIAL if dim is None else kind.at(dim) for dim in form.dims])
    return LocalCall(tensors=tensors, input_placements=tuple(input_placements), run=run, result=result)


def _looked_up(call: TorchCall, lies: Lies, kind: Sharded, size: int) -> LocalForm | None:
    """The form of a call whose sharded operands lie so."""
    lengths: dict[int, int] | None = _Renamed(size) if call.name in _OF_ANY_LENGTHS else None
    uneven, shards = None, lengths_of(kind)
    if shards is not None:  # decided as for even shards, of a length that no other dim has
        if sum(shards) < size:
            return None
        longest = max(length for tensor in call.tensors for length in (1, *tensor.shape))
        lengths, uneven = (_Kept(), (longest + 1) * size) if lengths is None else (lengths, (len(lengths) + 1) * size)
        lengths[sum(shards)] = uneven
    operand = functools.partial(_operand, lengths, lies)
    try:
        args, kwargs = signature(call.args, operand), signature(call.kwargs, operand)
        return local_form(call.function, args, kwargs, size, uneven)
    except TypeError:  # an argument that can't be hashed
        return None


def _operand(lengths: dict[int, int] | None, lies: Lies, tensor: Tensor) -> Operand:
    placement = lies.get(id(tensor))
    shape = tensor.shape if lengths is None else tuple([lengths[length] for length in tensor.shape])
    if isinstance(placement, InterleavedShard):
        return Operand(shape, tensor.dtype, tensor.device, placement.dim, placement.sizes)
    return Operand(shape, tensor.dtype, tensor.device, None if placement is None else placement.dim)


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
