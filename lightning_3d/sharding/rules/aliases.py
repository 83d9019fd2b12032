"""Tensors that a block makes of a weight before it multiplies with it: transposes, casts, what is picked by index.

    w.t(), w.mT, w.transpose(1, 2), w.to(dtype)     the same dims, perhaps in another order
    w[expert], w[experts], w.unbind()               dim 0, that of experts, is picked; the others stay

Such an alias is the weight: every rank makes it of its own part.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_3d.sharding.axis import Axis
from lightning_3d.sharding.rules.call import LocalCall, TorchCall
from lightning_3d.sharding.rules.contraction import is_weight
from lightning_3d.sharding.rules.function import tensors_in
from lightning_3d.sharding.sharded_tensor import ShardedTensor

AliasDims = tuple[int | None, ...]
"""By dim of an alias: the dim of the weight behind it; None where it was indexed away."""

_CASTS = frozenset({"to", "contiguous", "float", "half", "bfloat16", "type_as"})

_VIEWS = frozenset({"t", "T", "mT", "transpose", "swapaxes", "swapdims", "permute", "movedim"}) | {
    *("split", "chunk", "select", "unbind", "narrow", "__getitem__")
}

NAMES = (*_CASTS, *_VIEWS, "index_select")

_SLICED_FROM_DIM = 3
"""Weights of fewer dims have their features along dim 0: a slice of it cuts features, and picks nothing."""


def alias_dims(call: TorchCall) -> AliasDims | None:
    """For a call that makes aliases of its first argument the dims of each of them; None for any other call."""
    weight = call.first
    if call.name not in NAMES or not isinstance(weight, Tensor):
        return None
    every = range(weight.dim())
    if call.name in _CASTS:  # the memory format is the only option that changes more than the numbers' type and place
        return None if "memory_format" in call.kwargs else tuple(every)
    if (num_dims := _num_dims_of_index(call)) is not None:
        return (*[None] * num_dims, *every[1:]) if len(every) > 1 else None
    return _dims_of_view(call, weight) if call.name in _VIEWS and len(call.tensors) == 1 else None


def alias(call: TorchCall, axis: Axis) -> LocalCall | None:
    """A sharded weight in another form: every rank makes it of its own part."""
    weight = call.first
    if not isinstance(weight, ShardedTensor) or not is_weight(weight):
        return None
    dims, at = alias_dims(call), weight.placement
    if dims is None or at.dim not in dims or any(isinstance(tensor, ShardedTensor) for tensor in call.tensors[1:]):
        return None  # what picks from a weight, if it is a tensor, has to be whole on every rank
    return LocalCall(
        tensors=(weight,),
        input_placements=(at,),
        run=lambda local: call.function(local, *call.args[1:], **call.kwargs),
        result=at.at(dims.index(at.dim)),
        makes_weight=True,
    )


def _num_dims_of_index(call: TorchCall) -> int | None:
    """The dims of a tensor or list that picks along dim 0; None if none does, or not alone."""
    if call.name == "index_select":
        dim = call.kwargs.get("dim", call.args[1] if len(call.args) > 1 else None)
        return 1 if dim in (0, -call.first.dim()) else None
    first, *others = _items(call)
    if not all(other is Ellipsis or (isinstance(other, slice) and other == slice(None)) for other in others):
        return None
    if isinstance(first, Tensor):
        return None if first.dtype == torch.bool else first.dim()
    return 1 if isinstance(first, list) and all(type(item) is int for item in first) else None


def _dims_of_view(call: TorchCall, weight: Tensor) -> AliasDims | None:
    """Told by the strides of the same view of a tensor without memory, whose dims have strides of their own."""
    if not all(type(item) is int or isinstance(item, slice) or item is Ellipsis for item in _items(call)):
        return None
    strides = [2**32 + 2**dim for dim in range(weight.dim())]
    made = call.function(torch.empty_strided(weight.shape, strides, device="meta"), *call.args[1:], **call.kwargs)
    view = tensors_in(made)[0]
    dims = [dim for stride in view.stride() for dim in range(weight.dim()) if stride % strides[dim] == 0]
    cut = {dim for dim, length in zip(dims, view.shape, strict=True) if length != weight.shape[dim]}
    is_picked = 0 not in dims and weight.dim() > 1
    is_sliced = cut == {0} and weight.dim() >= _SLICED_FROM_DIM
    if sorted(dims) != [*range(is_picked, weight.dim())] or not (is_sliced or not cut):
        return None
    return tuple(None if dim in cut else dim for dim in dims)


def _items(call: TorchCall) -> Sequence[Any]:
    """The items that ``w[index]`` is indexed with; of a call of another function one that takes all."""
    if call.name != "__getitem__":
        return (Ellipsis,)
    return call.args[1] if isinstance(call.args[1], tuple) and call.args[1] else (call.args[1],)
