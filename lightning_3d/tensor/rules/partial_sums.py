"""Sums over ranks that wait until they are small: of a token's experts, all rows are added up before the all-reduce.

    row weight of experts        [tokens * k, width]     every rank has a part of the sum
    * scores, order, view        [tokens, k, width]      still
    sum over k                   [tokens, width]         still
    any other call               all-reduce

Until then every call is linear in the rows, so it can be made on the parts. Scores are read by all ranks, each with a
part of their gradient, as the inputs of column weights are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_3d.tensor.placement import EACH, Partial
from lightning_3d.tensor.rules.call import PARTIAL, Call, LocalCall
from lightning_3d.tensor.rules.function import Function, function_name, tensors_in
from lightning_3d.tensor.sharded_tensor import placement_of

_VIEWS = frozenset({"view", "reshape", "flatten", "unflatten", "unsqueeze", "squeeze", "transpose", "permute"})

_PRODUCTS = frozenset({"mul", "__mul__", "__rmul__"})


def on_parts_of_sum(call: Call) -> LocalCall | None:
    """A call that every rank makes on its part of a sum, so that the sum of the results is the result of the sum."""
    if not keeps_partial(call.function, call.args, call.kwargs, is_sum, _is_plain):
        return None
    tensors = call.tensors
    needs = tuple(PARTIAL if is_sum(tensor) else EACH for tensor in tensors)
    return LocalCall(tensors=tensors, needs=needs, run=call.run, result=PARTIAL)


def is_sum(tensor: object) -> bool:
    """Whether a tensor is a sum over the ranks that is not made yet."""
    return isinstance(placement_of(tensor), Partial)


def _is_plain(tensor: Tensor) -> bool:
    return placement_of(tensor) is None


def keeps_partial(
    function: Function,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    is_partial: Callable[[Tensor], bool],
    is_plain: Callable[[Tensor], bool],
) -> bool:
    """Whether every rank can make a call on its part of a sum, so that the sum of the results is the result of the sum.

    Args:
        function: The called function.
        args: Its positional arguments.
        kwargs: Its keyword arguments.
        is_partial: Whether a tensor is a sum that is not made yet.
        is_plain: Whether a tensor is replicated.
    """
    name, tensors = function_name(function), list(tensors_in((tuple(args), dict(kwargs))))
    partial = next((tensor for tensor in tensors if is_partial(tensor)), None)
    if partial is None or not all(tensor is partial or is_plain(tensor) for tensor in tensors):
        return False
    if name in _PRODUCTS:
        return len(args) == 2 and not kwargs and _scales(partial, *args)
    if args[0] is not partial:
        return False
    if name == "__getitem__":
        return isinstance(args[1], Tensor) and args[1].shape == partial.shape[:1] and args[1].dtype == torch.int64
    if len(tensors) > 1:
        return False
    if name == "sum":
        return "dtype" not in kwargs and len(args) + len(kwargs) > 1
    if name == "to":
        return tuple(args[1:]) == (partial.dtype,) and not kwargs
    return name in _VIEWS and not any(isinstance(item, torch.dtype) for item in args[1:])


def _scales(partial: Tensor, left: Any, right: Any) -> bool:
    """Whether a product is of the partial sum and a number, or a tensor that is broadcast to it."""
    if left is right:
        return False
    other = right if left is partial else left
    if not isinstance(other, Tensor):
        return isinstance(other, int | float)
    is_real = other.dtype == partial.dtype
    return is_real and torch.broadcast_shapes(other.shape, partial.shape) == partial.shape
