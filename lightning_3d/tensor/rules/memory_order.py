"""How whole tensors lie in memory where a rank's parts of them don't show it.

A part with a single element along its sharded dim (one head per rank) lies in memory in the same way, wherever that dim
stands in the order of the whole tensor's dims; that order decides which element gets which random number. So calls are
made once more on whole tensors without data, once per signature.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_3d.tensor.placement import Sharded
from lightning_3d.tensor.rules.call import Call
from lightning_3d.tensor.rules.function import Function, map_tensors, tensors_in
from lightning_3d.tensor.rules.local_form import signature, with_operands
from lightning_3d.tensor.sharded_tensor import ShardedTensor
from lightning_3d.torch_internals.dispatch import no_dispatch_modes

_MAX_SIGNATURES = 8192

Strides = tuple[tuple[int, ...], ...]


class _Whole(NamedTuple):
    """A whole tensor without data."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype


def ordered(call: Call, results: Any) -> Any:
    """The results of a call, which know how one process would have them in memory where their parts don't show it."""
    if not any(map(_is_unclear, tensors_in(results))):
        return results
    try:
        strides = iter(_strides(call.function, signature(call.args, _whole), signature(call.kwargs, _whole)))
    except TypeError:  # an argument that can't be hashed
        return results
    return map_tensors(lambda result: _in_order(call, result, next(strides, None)), results)


def _in_order(call: Call, result: Tensor, stride: tuple[int, ...] | None) -> Tensor:
    if stride is None or not isinstance(result, ShardedTensor) or not _is_unclear(result):
        return result
    if not _go_together(stride, result):
        return result
    is_argument = any(result is tensor for tensor in call.tensors)
    if is_argument and call.destination is None and stride != _whole(result).stride:  # one process makes a copy
        result = ShardedTensor(result.local.clone(), result.axis, result.placement, is_weight=result.is_weight)
    result.whole_stride = stride
    return result


def dense_stride(shape: tuple[int, ...], stride: tuple[int, ...]) -> tuple[int, ...]:
    """The strides of a new tensor like one of these."""
    with no_dispatch_modes():
        return torch.empty_like(torch.empty_strided(shape, stride, device="meta")).stride()


def whole_layout(local: Tensor, dim: int, size: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shape and strides of a new tensor like the whole one; its dims lie in memory in the order of those of a part."""
    own_shape, stride = local.shape, list(local.stride())
    for i in reversed(range(local.dim())):  # an expanded dim stays where it stands
        if stride[i] == 0 and own_shape[i] > 1:
            stride[i] = stride[i + 1] * own_shape[i + 1] if i + 1 < local.dim() else 1
    # Of equal strides that of a dim of one element is the inner one.
    inner_first = sorted(range(local.dim()), key=lambda i: (-stride[i], own_shape[i] == 1, i), reverse=True)
    shape = [n * size if i == dim else n for i, n in enumerate(own_shape)]
    num_inner = 1
    for i in inner_first:
        stride[i] = num_inner
        num_inner *= shape[i]
    return tuple(shape), tuple(stride)


def _is_unclear(result: Tensor) -> bool:
    if not isinstance(result, ShardedTensor) or not isinstance(result.placement, Sharded):
        return False
    local = result.local
    return local.shape[result.placement.dim] == 1 and sum(n > 1 for n in local.shape) > 1


def _whole(tensor: Tensor) -> _Whole:
    if not isinstance(tensor, ShardedTensor) or not isinstance(tensor.placement, Sharded):
        return _Whole(tuple(tensor.shape), tensor.stride(), tensor.dtype)
    stride = tensor.whole_stride or whole_layout(tensor.local, tensor.placement.dim, tensor.axis.size)[1]
    return _Whole(tuple(tensor.shape), stride, tensor.dtype)


@functools.lru_cache(_MAX_SIGNATURES)
def _strides(function: Function, args: Any, kwargs: Any) -> Strides:
    """The strides of the results; none if the call can't be made without data."""
    with no_dispatch_modes(), torch.inference_mode(False), torch.no_grad():
        try:
            whole_args, whole_kwargs = with_operands((args, kwargs), _Whole, _empty)
            return tuple([tensor.stride() for tensor in tensors_in(function(*whole_args, **whole_kwargs))])
        except Exception:  # as code that looks at its data does
            return ()


def _empty(whole: _Whole) -> Tensor:
    return torch.empty_strided(whole.shape, whole.stride, dtype=whole.dtype, device="meta")


def _go_together(stride: tuple[int, ...], result: ShardedTensor) -> bool:
    """Whether the other dims are ordered as in the part: kernels may differ from those without data."""
    others = [i for i, n in enumerate(result.local.shape) if n > 1]
    own = result.local.stride()
    return sorted(others, key=lambda i: stride[i]) == sorted(others, key=lambda i: own[i])
