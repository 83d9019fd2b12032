"""Sums over ranks that wait until they are small: of a token's experts, all rows are added up before the all-reduce.

    row weight of experts        [tokens * k, width]     every rank has a part of the sum
    * scores, order, view        [tokens, k, width]      still
    sum over k                   [tokens, width]         still
    any other call               all-reduce

Until then every call is linear in the rows, so it can be made on the parts. Scores are read by all ranks, each with a
part of their gradient, as the inputs of column weights are.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lightning_3d.tensor.placement import EACH, Partial
from lightning_3d.tensor.rules.call import PARTIAL, Call, LocalCall
from lightning_3d.tensor.sharded_tensor import placement_of

_VIEWS = frozenset({"view", "reshape", "flatten", "unflatten", "unsqueeze", "squeeze", "transpose", "permute"})

_PRODUCTS = frozenset({"mul", "__mul__", "__rmul__"})


def is_sum(tensor: object) -> bool:
    """Whether a tensor is a sum over the ranks that is not made yet."""
    return isinstance(placement_of(tensor), Partial)


def on_parts_of_sum(call: Call) -> LocalCall | None:
    """A call that every rank makes on its part of a sum, so that the sum of the results is the result of the sum."""
    partial = next((tensor for tensor in call.tensors if is_sum(tensor)), None)
    others = [tensor for tensor in call.tensors if tensor is not partial]
    if partial is None or any(placement_of(tensor) is not None for tensor in others) or not is_linear_in(partial, call):
        return None
    needs = tuple(PARTIAL if tensor is partial else EACH for tensor in call.tensors)
    return LocalCall(tensors=call.tensors, needs=needs, run=call.run, result=PARTIAL)


def is_linear_in(partial: Tensor, call: Call) -> bool:
    """Whether the sum of the results of a call on parts of one of its tensors is its result on the sum of the parts."""
    args, kwargs = call.args, call.kwargs
    if call.name in _PRODUCTS:
        return len(args) == 2 and not kwargs and _scales(partial, *args)
    if call.first is not partial:
        return False
    if call.name == "__getitem__":
        return isinstance(args[1], Tensor) and args[1].shape == partial.shape[:1] and args[1].dtype == torch.int64
    if not call.starts_with_its_tensor:
        return False
    if call.name == "sum":
        return "dtype" not in kwargs and len(args) + len(kwargs) > 1
    if call.name == "to":
        return args[1:] == (partial.dtype,) and not kwargs
    return call.name in _VIEWS and not any(isinstance(item, torch.dtype) for item in args[1:])


def _scales(partial: Tensor, left: Any, right: Any) -> bool:
    """Whether a product is of the partial sum and a number, or a tensor that is broadcast to it."""
    if left is right:
        return False
    other = right if left is partial else left
    if not isinstance(other, Tensor):
        return isinstance(other, int | float)
    is_real = other.dtype == partial.dtype
    return is_real and torch.broadcast_shapes(other.shape, partial.shape) == partial.shape
