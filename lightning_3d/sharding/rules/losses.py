"""Losses of which the ranks have rows: the sum of their own losses over the count of all.

    cross_entropy, nll_loss      their mean is over valid labels, or over the weights of these labels' classes
    mse_loss, l1_loss, ...       over elements, or over the weights of elements

A mean of the ranks' means would be another number, as one rank may have fewer valid labels than another. So a loss with
a reduction is rewritten as what it consists of: its rows, their sum, and the count. Of labels that every rank has whole
the count takes no communication.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_3d.sharding.axis import Axis
from lightning_3d.sharding.placement import REPLICATE_PARTIAL_GRAD
from lightning_3d.sharding.rules.call import PARTIAL, InputPlacement, LocalCall, TorchCall
from lightning_3d.sharding.rules.function import Function
from lightning_3d.sharding.sharded_tensor import placement_of

_OF_CLASSES: frozenset[Function] = frozenset({F.cross_entropy, F.nll_loss})
_OF_ELEMENTS: frozenset[Function] = frozenset(
    (
        *(F.mse_loss, F.l1_loss, F.smooth_l1_loss, F.huber_loss, F.kl_div),
        *(F.binary_cross_entropy, F.binary_cross_entropy_with_logits),
    )
)
NAMES = tuple(function.__name__ for function in _OF_CLASSES | _OF_ELEMENTS)
_SIGNATURES = {function: inspect.signature(function) for function in _OF_CLASSES | _OF_ELEMENTS}


def as_rows_over_count(function: Function, args: Sequence[object], kwargs: Mapping[str, object]) -> Function | None:
    """A function with the same arguments and result as a loss with a reduction; None for any other call."""
    if function not in _SIGNATURES:
        return None
    call = _arguments(function, args, kwargs)
    is_deprecated = call.get("size_average") is not None or call.get("reduce") is not None
    if is_deprecated or call["reduction"] not in ("mean", "sum", "batchmean"):
        return None
    if call["reduction"] == "sum" and function in _OF_CLASSES and _sums_wide(call["input"]):
        return None  # a sum of own rows is one of all but for the ranks
    return functools.partial(_rows_over_count, function)


def _rows_over_count(function: Function, *args: object, **kwargs: object) -> Tensor:
    call = _arguments(function, args, kwargs)
    reduction, input = call["reduction"], call["input"]
    if function in _OF_CLASSES and _sums_wide(input):
        summed: Tensor = function(**call | {"reduction": "sum"})
        return summed / _count(**call)
    losses: Tensor = function(**call | {"reduction": "none"})
    if reduction == "sum":
        return losses.sum()
    if reduction == "batchmean":
        return losses.sum() / len(input)
    if function in _OF_CLASSES:
        # In 16 bits a sum of many rows may overflow where their mean does not.
        total = losses.sum(dtype=torch.promote_types(losses.dtype, torch.float32))
        return (total / _count(**call)).to(losses.dtype)
    is_divided_by_weights = function in (F.mse_loss, F.l1_loss) and call["weight"] is not None
    return losses.sum() / call["weight"].sum() if is_divided_by_weights else losses.mean()


def _sums_wide(input: Tensor) -> bool:
    """Whether losses of classes are summed in 32 bits or more."""
    return torch.finfo(input.dtype).bits >= 32 or torch.is_autocast_enabled(input.device.type)


def _count(*, input: Tensor, target: Tensor, weight: Tensor | None, ignore_index: int, **_: object) -> Tensor | int:
    """The divisor of a mean over rows."""
    if target.is_floating_point():
        return input.numel() // input.shape[_class_dim(input)]
    return weights_of_labels(target, weight, ignore_index)


def _class_dim(input: Tensor) -> int:
    return min(1, input.dim() - 1)


def weights_of_labels(labels: Tensor, weight: Tensor | None, ignore_index: int) -> Tensor:
    """The sum of the weights of valid labels, 0-d; their number if classes have no weights."""
    is_valid = labels != ignore_index
    return (is_valid if weight is None else weight[labels.where(is_valid, 0)] * is_valid).sum()


def of_own_rows(call: TorchCall, axis: Axis) -> LocalCall | None:
    """The losses of each row, or their sum, on this rank's rows."""
    if call.function not in _OF_CLASSES:
        return None
    given = _arguments(call.function, call.args, call.kwargs)
    input, target = given["input"], given["target"]
    along = placement_of(input)
    if along is None or given["reduction"] not in ("none", "sum") or along.dim == _class_dim(input):
        return None
    rows = along.at(0 if along.dim == 0 else along.dim - 1)  # without the dim of the classes

    def input_placement(tensor: Tensor) -> InputPlacement:
        if tensor is input:
            return along
        if tensor is target:
            return along if target.is_floating_point() else rows
        return REPLICATE_PARTIAL_GRAD

    placements = tuple(input_placement(tensor) for tensor in call.tensors)
    result = PARTIAL if given["reduction"] == "sum" else rows
    return LocalCall(tensors=call.tensors, input_placements=placements, run=call.run, result=result)


def of_own_elements(call: TorchCall, axis: Axis) -> LocalCall | None:
    """The losses of each element without a reduction, on this rank's elements."""
    if call.function not in _OF_ELEMENTS:
        return None
    given = _arguments(call.function, call.args, call.kwargs)
    input: Tensor = given["input"]
    along = placement_of(input)
    if along is None or given["reduction"] != "none" or any(tensor.dim() > input.dim() for tensor in call.tensors):
        return None
    from_end = along.dim - input.dim()

    def input_placement(tensor: Tensor) -> InputPlacement:
        is_broadcast = tensor.dim() < -from_end or tensor.shape[from_end] != input.shape[from_end]
        return REPLICATE_PARTIAL_GRAD if is_broadcast else along.at(tensor.dim() + from_end)

    placements = tuple(input_placement(tensor) for tensor in call.tensors)
    return LocalCall(tensors=call.tensors, input_placements=placements, run=call.run, result=along)


def _arguments(function: Function, args: Sequence[object], kwargs: Mapping[str, object]) -> dict[str, Any]:
    bound = _SIGNATURES[function].bind(*args, **kwargs)
    bound.apply_defaults()
    return bound.arguments
