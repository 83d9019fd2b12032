"""Tensors that a block makes of a weight before it multiplies with it: transposes, casts, what is picked by index.

    w.t(), w.mT, w.transpose(1, 2), w.to(dtype)     the same dims, perhaps in another order
    w[expert], w[experts], w.unbind()               dim 0, that of experts, is picked; the others stay

Such an alias is the weight: every rank makes it of its own part.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from lightning_3d.tensor.axis import Axis
from lightning_3d.tensor.rules.call import LocalCall, TorchCall
from lightning_3d.tensor.rules.contraction import is_weight
from lightning_3d.tensor.rules.function import Function
from lightning_3d.tensor.sharded_tensor import ShardedTensor

AliasDims = tuple[int | None, ...]
"""By dim of an alias: the dim of the weight behind it; None where it was indexed away."""

_PRIMES = (2, 3, 5, 7, 11, 13, 17)

_SLICED_FROM_DIM = 3
"""Weights of fewer dims have their features along dim 0: a slice of it cuts features, and picks nothing."""


def alias_dims(call: TorchCall) -> AliasDims | None:
    """For a call that makes aliases of its first argument the dims of each of them; None for any other call."""
    read = _READERS.get(call.name)
    if read is None or not isinstance(call.first, Tensor) or call.first.dim() > len(_PRIMES):
        return None
    return read(call.function, *call.args, **call.kwargs)


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


def _same(function: Function, tensor: Tensor, *args: object, **kwargs: object) -> AliasDims | None:
    # The memory format is the only option that changes more than the numbers' type and place.
    return None if "memory_format" in kwargs else tuple(range(tensor.dim()))


def _permuted(function: Function, tensor: Tensor, *args: Any, **kwargs: Any) -> AliasDims | None:
    whole = torch.empty(_PRIMES[: tensor.dim()], device="meta")  # no two dims are alike
    return tuple(whole.stride().index(stride) for stride in function(whole, *args, **kwargs).stride())


def _item(function: Function, tensor: Tensor, index: Any) -> AliasDims | None:
    first, *others = index if isinstance(index, tuple) and index else (index,)
    if not all(other is Ellipsis or (isinstance(other, slice) and other == slice(None)) for other in others):
        return None
    if isinstance(first, slice):
        return _sliced(tensor)
    if isinstance(first, Tensor):
        return None if first.dtype == torch.bool else _picked(tensor, first.dim())
    if isinstance(first, list) and all(type(item) is int for item in first):
        return _picked(tensor, 1)
    return _picked(tensor, 0) if type(first) is int else None


def _select(function: Function, tensor: Tensor, dim: int = 0, index: int = 0) -> AliasDims | None:
    return _picked(tensor, 0) if dim % tensor.dim() == 0 else None


def _index_select(function: Function, tensor: Tensor, dim: int, index: Tensor) -> AliasDims | None:
    return _picked(tensor, 1) if dim % tensor.dim() == 0 else None


def _narrow(function: Function, tensor: Tensor, dim: int, start: int, length: int) -> AliasDims | None:
    return _sliced(tensor) if dim % tensor.dim() == 0 else None


def _split(function: Function, tensor: Tensor, pieces: object, dim: int = 0) -> AliasDims | None:
    return _sliced(tensor) if dim % tensor.dim() == 0 else None


def _picked(tensor: Tensor, num_dims: int) -> AliasDims | None:
    """Indexing dim 0 by an n-d index: (E, ...) -> (i1, ..., in, ...)."""
    return (*[None] * num_dims, *range(1, tensor.dim())) if tensor.dim() > 1 else None


def _sliced(tensor: Tensor) -> AliasDims | None:
    return _picked(tensor, 1) if tensor.dim() >= _SLICED_FROM_DIM else None


_READERS: Mapping[str, Callable[..., AliasDims | None]] = {
    **dict.fromkeys(("t", "T", "mT", "transpose", "swapaxes", "swapdims", "permute", "movedim"), _permuted),
    **dict.fromkeys(("to", "contiguous", "float", "half", "bfloat16", "type_as"), _same),
    **dict.fromkeys(("split", "chunk"), _split),
    **dict.fromkeys(("select", "unbind"), _select),
    "__getitem__": _item,
    "index_select": _index_select,
    "narrow": _narrow,
}
"""By the function's name."""

NAMES = tuple(_READERS)
