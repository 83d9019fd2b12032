"""Functions of logits that are answered without them, by other rows of the head."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_3d.tensor.rules.function import Function
from lightning_3d.tensor.vocabulary.chunked_loss import Elementwise
from lightning_3d.tensor.vocabulary.head_call import HeadCall


@dataclass(frozen=True, kw_only=True, slots=True)
class View:
    """How a tensor comes from a head's logits."""

    call: HeadCall
    rows: Tensor
    """``[..., width]``: the rows of its logits, in the order of its other dims."""
    class_dim: int
    then: tuple[Elementwise, ...]
    dtype: torch.dtype
    make: Callable[[str], Tensor]
    """The plain tensor, given the name of the function that reads it."""
    is_log: bool = False
    """Whether they are logarithms of probabilities, of the logits after `then`."""

    @property
    def shape(self) -> list[int]:
        """The shape of the tensor."""
        shape = list(self.rows.shape[:-1])
        shape.insert(self.class_dim, self.call.num_classes)
        return shape


class Logits(Protocol):
    """Logits that are not there yet."""

    view_of_head: View

    def plain(self, reader: str) -> Tensor:
        """The logits, with their graph."""


Carry = Callable[[Logits, Function, Sequence[Any], Mapping[str, Any]], "View | None"]
"""Answers a call by another view of the logits; None if it needs them."""


def _derived(logits: Logits, func: Function, args: Sequence[Any], kwargs: Mapping[str, Any], **changes: Any) -> View:
    has_grad = torch.is_grad_enabled()

    def make(reader: str) -> Tensor:
        with torch.set_grad_enabled(has_grad):
            made: Tensor = func(logits.plain(reader), *args, **kwargs)
        return made

    return replace(logits.view_of_head, make=make, **changes)


def _index(logits: Logits, func: Function, args: Sequence[Any], kwargs: Mapping[str, Any]) -> View | None:
    view = logits.view_of_head
    last = view.rows.dim() - 1
    (index,) = args
    parts = list(index) if isinstance(index, tuple) else [index]
    if view.class_dim != last or not all(_is_index(part) for part in parts):
        return None
    lengths = [_num_dims(part) for part in parts]
    if Ellipsis not in [part for part in parts if not isinstance(part, Tensor)]:
        parts, lengths = [*parts, Ellipsis], [*lengths, 0]
    position = next(i for i, part in enumerate(parts) if part is Ellipsis)
    missing = last + 1 - sum(lengths)
    if missing < 0:
        return None
    parts[position : position + 1] = [slice(None)] * missing
    if parts[-1] is None or isinstance(parts[-1], (int, Tensor)) or parts[-1] != slice(None):
        return None
    rows = view.rows[tuple(parts)]
    return _derived(logits, func, args, kwargs, rows=rows, class_dim=rows.dim() - 1)


def _is_index(part: Any) -> bool:
    if isinstance(part, Tensor):
        return type(part) is Tensor and part.dtype in (torch.bool, torch.int64)
    return part is None or part is Ellipsis or (isinstance(part, (int, slice)) and not isinstance(part, bool))


def _num_dims(part: Any) -> int:
    """The dims that a part of an index takes."""
    if isinstance(part, Tensor) and part.dtype == torch.bool:
        return part.dim()
    return 0 if part is None or part is Ellipsis else 1


def _reshape(logits: Logits, func: Function, args: Sequence[Any], kwargs: Mapping[str, Any]) -> View | None:
    view = logits.view_of_head
    shape = list(args[0]) if args and isinstance(args[0], (tuple, list)) else list(args)
    if kwargs or not shape or not all(type(length) is int for length in shape):
        return None
    if -1 in shape:
        shape[shape.index(-1)] = math.prod(view.shape) // max(-math.prod(shape), 1)
    is_kept = shape[-1] == view.shape[-1] and math.prod(shape) == math.prod(view.shape)
    if view.class_dim != view.rows.dim() - 1 or not is_kept:
        return None
    return _derived(
        logits,
        func,
        args,
        kwargs,
        rows=view.rows.reshape(*shape[:-1], view.rows.shape[-1]),
        class_dim=len(shape) - 1,
    )


def _flatten(logits: Logits, func: Function, args: Sequence[Any], kwargs: Mapping[str, Any]) -> View | None:
    view = logits.view_of_head
    bounds = dict(zip(("start_dim", "end_dim"), args, strict=False)) | dict(kwargs)
    start, end = (bounds.pop(name, default) % view.rows.dim() for name, default in (("start_dim", 0), ("end_dim", -1)))
    if bounds or view.class_dim != view.rows.dim() - 1 or not start <= end < view.class_dim:
        return None
    shape = (*view.shape[:start], math.prod(view.shape[start : end + 1]), *view.shape[end + 1 :])
    return _reshape(logits, Tensor.reshape, shape, {})


def _transpose(logits: Logits, func: Function, args: Sequence[Any], kwargs: Mapping[str, Any]) -> View | None:
    if kwargs or len(args) != 2:
        return None
    order = list(range(logits.view_of_head.rows.dim()))
    first, second = args
    order[first], order[second] = order[second], order[first]
    return _ordered(logits, func, args, order)


def _permute(logits: Logits, func: Function, args: Sequence[Any], kwargs: Mapping[str, Any]) -> View | None:
    dims = args[0] if len(args) == 1 and isinstance(args[0], (tuple, list)) else args
    if kwargs or len(dims) != logits.view_of_head.rows.dim():
        return None
    return _ordered(logits, func, args, [dim % len(dims) for dim in dims])


def _ordered(logits: Logits, func: Function, args: Sequence[Any], order: Sequence[int]) -> View:
    view = logits.view_of_head
    last = len(order) - 1
    places = [last if dim == view.class_dim else dim - (dim > view.class_dim) for dim in order]  # of the rows' dims
    others = [place for place in places if place != last]
    rows = view.rows.permute(*others, last)
    return _derived(logits, func, args, {}, rows=rows, class_dim=places.index(last))


def _same(logits: Logits, func: Function, args: Sequence[Any], kwargs: Mapping[str, Any]) -> View | None:
    return None if args or kwargs else _derived(logits, func, args, kwargs)


@dataclass(frozen=True, slots=True)
class Cast:
    """Logits in another dtype."""

    dtype: torch.dtype

    def __call__(self, logits: Tensor) -> Tensor:
        return logits.to(self.dtype)


_CASTS = {Tensor.float: torch.float32, Tensor.double: torch.float64}


def _to(logits: Logits, func: Function, args: Sequence[Any], kwargs: Mapping[str, Any]) -> View | None:
    if func in _CASTS and not args and not kwargs:
        dtype: Any = _CASTS[func]
    elif func is Tensor.to and len(args) == 1 and not kwargs:
        dtype = args[0]
    else:
        return None
    view = logits.view_of_head
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        return None
    if view.is_log:  # the loss is that of their own dtype, or wider
        is_wider = torch.promote_types(view.dtype, dtype) == dtype
        return _derived(logits, func, args, kwargs, dtype=dtype) if is_wider else None
    return _derived(logits, func, args, kwargs, then=_cast(view, dtype), dtype=dtype)


def _cast(view: View, dtype: torch.dtype) -> tuple[Elementwise, ...]:
    return view.then if dtype == view.dtype else (*view.then, Cast(dtype))


def _log_softmax(logits: Logits, func: Function, args: Sequence[Any], kwargs: Mapping[str, Any]) -> View | None:
    view = logits.view_of_head
    names = ("dim", "_stacklevel", "dtype") if func is F.log_softmax else ("dim", "dtype")
    options = dict(zip(names, args, strict=False)) | dict(kwargs)
    dim = options.get("dim")
    if view.is_log or type(dim) is not int or dim % view.rows.dim() != view.class_dim or "out" in options:
        return None
    single = view.rows.new_empty([1] * view.rows.dim(), dtype=view.dtype)
    dtype = func(single, *args, **kwargs).dtype  # autocast has a say
    if torch.finfo(dtype).bits < 32:  # rounded, which the loss sees
        return None
    options = {"dim": dim, "dtype": dtype}
    return _derived(logits, torch.log_softmax, (), options, then=_cast(view, dtype), dtype=dtype, is_log=True)


def _elementwise(logits: Logits, func: Function, args: Sequence[Any], kwargs: Mapping[str, Any]) -> View | None:
    view = logits.view_of_head
    if kwargs or view.is_log or not all(type(arg) in (int, float) for arg in args):
        return None
    return _derived(logits, func, args, kwargs, then=(*view.then, lambda chunk: func(chunk, *args)))


CARRIED: Mapping[Function, Carry] = {
    Tensor.__getitem__: _index,
    Tensor.view: _reshape,
    Tensor.reshape: _reshape,
    torch.reshape: _reshape,
    Tensor.flatten: _flatten,
    torch.flatten: _flatten,
    Tensor.transpose: _transpose,
    torch.transpose: _transpose,
    Tensor.swapaxes: _transpose,
    Tensor.permute: _permute,
    torch.permute: _permute,
    Tensor.contiguous: _same,
    Tensor.clone: _same,
    torch.clone: _same,
    Tensor.float: _to,
    Tensor.to: _to,
    Tensor.double: _to,
    F.log_softmax: _log_softmax,
    torch.log_softmax: _log_softmax,
    Tensor.log_softmax: _log_softmax,
    **dict.fromkeys(
        (
            Tensor.mul,
            Tensor.__mul__,
            Tensor.__rmul__,
            torch.mul,
            Tensor.div,
            Tensor.__truediv__,
            Tensor.true_divide,
            torch.div,
            torch.true_divide,
            Tensor.tanh,
            torch.tanh,
        ),
        _elementwise,
    ),
}
"""Functions, and what answers them."""
