"""Tensors whose sharded dim is in grouped order (`parts`), and what a call with one of them does on each rank.

They come from fused projections (parts: query, key, value) and from flattening a sharded dim into one before it, as in
``[batch, heads, ...] -> [batch * heads, ...]`` (one part per batch element). DTensor has no placement for unequal
parts and few rules for equal ones. As elsewhere (`reading`), planning and execution take their decisions here.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from lightning_3d.tensor.parts import Parts
from lightning_3d.tensor.rules.dropout import Dropout, as_dropout
from lightning_3d.tensor.rules.function import Function, function_name, tensors_in
from lightning_3d.torch_internals.tensors import make_wrapper, no_torch_function

_CUTS = frozenset({"split", "split_with_sizes", "chunk", "tensor_split", "narrow", "__getitem__"})

_VIEWS = frozenset({"view", "reshape", "unflatten", "flatten", "unsqueeze", "squeeze"})

_ELEMENTWISE = frozenset(
    {"__add__", "__radd__", "__sub__", "__mul__", "__rmul__", "__truediv__", "add", "sub", "mul", "div", "clamp"}
    | {"clip", "clone", "contiguous", "to", "float", "half", "bfloat16", "detach", "exp", "masked_fill", "where"}
)

_IN_PLACE = frozenset({"add_", "sub_", "mul_", "div_", "clamp_", "__iadd__", "__isub__", "__imul__", "__itruediv__"})
"""Elementwise, on the first argument."""

_MAX_VIEWS = 8192
"""Shapes of views that are kept."""

_NORMALIZING = frozenset({"softmax", "log_softmax", "cumsum"})
"""Calls of one tensor along one dim."""

_BATCHED = frozenset({"bmm", "baddbmm", "matmul", "__matmul__"})
"""Calls on stacks of matrices."""

_METADATA = frozenset(
    {"shape", "size", "dim", "ndim", "ndimension", "numel", "nelement", "dtype", "device", "layout", "requires_grad"}
    | {"is_floating_point", "is_complex", "is_cuda", "is_cpu", "is_meta", "is_sparse", "is_nested", "is_quantized"}
    | {"element_size", "itemsize", "is_leaf", "__len__"}
)


class GroupedTensor(Tensor):
    """A handle that shows the full shape in user code. Its data is the rank's own shard, `local`.

    The mode that runs a block on shards answers all calls with it. A call that it does not see raises.
    """

    local: Tensor
    mesh: DeviceMesh
    parts: Parts
    is_weight: bool = False
    """Whether it is a weight, or was made of one."""

    @staticmethod
    def __new__(cls, local: Tensor, mesh: DeviceMesh, parts: Parts) -> GroupedTensor:
        shape = [*local.shape[: parts.dim], sum(parts.sizes), *local.shape[parts.dim + 1 :]]
        return make_wrapper(cls, shape, dtype=local.dtype, device=local.device, requires_grad=local.requires_grad)

    def __init__(self, local: Tensor, mesh: DeviceMesh, parts: Parts) -> None:
        self.local, self.mesh, self.parts = local, mesh, parts

    __torch_function__ = no_torch_function  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch declares an instance method
        cls, func: Callable[..., Any], types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        raise NotImplementedError(f"{func} on a tensor of sharded parts, from code that tensor parallel does not see")


@dataclass(frozen=True, kw_only=True, slots=True)
class Reads:
    """The call reads metadata only."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Cuts:
    """The call cuts the tensor between its parts."""

    pieces: tuple[Parts, ...]

    starts: tuple[int, ...]
    """Where the pieces begin, in the original order."""

    is_single: bool
    """The result is one tensor, not a tuple."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Reshapes:
    """The call is a view of a tensor; the dim with the parts stays, or a sharded dim becomes one with parts."""

    shape: tuple[int, ...]
    """The full result's."""

    parts: Parts

    @property
    def local_shape(self) -> tuple[int, ...]:
        return _with(self.shape, self.parts.dim, sum(self.parts.local_sizes))


@dataclass(frozen=True, kw_only=True, slots=True)
class Opens:
    """The call is a view that gives the parts a dim of their own; what follows that dim is evenly sharded."""

    shape: tuple[int, ...]
    """Full shape with the dims (parts, features of a part) in place of the dim with the parts."""

    dim: int
    """Of the features of a part."""

    num_ranks: int

    result: tuple[int, ...]
    """Full shape of the result, a view of `shape`."""

    @property
    def local_shape(self) -> tuple[int, ...]:
        return _with(self.shape, self.dim, self.shape[self.dim] // self.num_ranks)


@dataclass(frozen=True, kw_only=True, slots=True)
class Drops:
    """The call is elementwise dropout."""

    dropout: Dropout
    parts: Parts


@dataclass(frozen=True, kw_only=True, slots=True)
class Keeps:
    """Every rank makes the call on its own shards."""

    parts: Parts
    """Of the result."""

    is_in_place: bool = False
    """The result is the first argument."""


GroupedCall = Reads | Cuts | Reshapes | Opens | Drops | Keeps

PartsOf = Callable[[Tensor], Parts | None]
"""The parts of a tensor; None for one that is not in grouped order."""


def as_grouped_call(
    function: Function,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    parts_of: PartsOf,
    is_plain: Callable[[Tensor], bool],
) -> GroupedCall | None:
    """What a call with tensors in grouped order does on each rank; None if it needs them whole.

    Args:
        function: What is called.
        args: Its positional arguments.
        kwargs: Its keyword arguments.
        parts_of: The parts of a tensor in grouped order; None for any other.
        is_plain: Whether a tensor is replicated.
    """
    name = function_name(function)
    if name in _METADATA:
        return Reads()
    tensor = args[0] if args and isinstance(args[0], Tensor) else None
    parts = None if tensor is None else parts_of(tensor)
    if tensor is not None and parts is not None:
        if (pieces := cut_pieces(function, args, kwargs, parts.dim)) is not None:
            return _cut(parts, pieces, is_single=name in ("narrow", "__getitem__"))
        if (shape := viewed_shape(function, args, kwargs)) is not None:
            return _viewed(tuple(tensor.shape), shape, parts)
        if name in ("transpose", "swapaxes") and not kwargs and len(args) == 3:
            dims = {int(dim) % tensor.dim() for dim in args[1:]}
            return None if parts.dim in dims else Keeps(parts=parts)
        if name in _NORMALIZING:
            along = kwargs.get("dim", args[1] if len(args) > 1 else None)
            return Keeps(parts=parts) if isinstance(along, int) and along % tensor.dim() != parts.dim else None
        if (dropout := as_dropout(function, args, kwargs)) is not None:
            return Drops(dropout=dropout, parts=parts)
        if name == "gather" and len(args) == 3 and not kwargs:
            along, index = args[1] % tensor.dim(), args[2]
            is_apart = along != parts.dim and index.shape[parts.dim] == tensor.shape[parts.dim]
            return _kept(name, args, kwargs, parts_of) if is_apart and is_plain(index) else None
    if not all(is_plain(other) or parts_of(other) for other in tensors_in((args, kwargs))):
        return None
    return _kept(name, args, kwargs, parts_of)


def reads_metadata(function: Function) -> bool:
    """Whether a call reads no more of a tensor than what a handle knows."""
    return function_name(function) in _METADATA


def cut_pieces(
    function: Function, args: Sequence[Any], kwargs: Mapping[str, Any], dim: int
) -> list[tuple[int, int]] | None:
    """The ranges (start, stop) along `dim` that a call cuts its first argument into, or None."""
    name = function_name(function)
    if name not in _CUTS or not _is_alone(args, kwargs) or (name == "__getitem__" and not _is_slice(args[1])):
        return None
    whole = torch.empty(args[0].shape, device="meta")
    pieces = []
    for piece in tensors_in(function(whole, *args[1:], **kwargs)):
        if piece.stride() != whole.stride() or piece.storage_offset() % whole.stride(dim):
            return None
        if _with(piece.shape, dim, 0) != _with(whole.shape, dim, 0):
            return None
        start = piece.storage_offset() // whole.stride(dim)
        pieces.append((start, start + piece.shape[dim]))
    return pieces


def viewed_shape(function: Function, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[int, ...] | None:
    """The full shape of the result if a call gives its first argument another shape, or None."""
    name = function_name(function)
    adds_dims = name == "__getitem__" and _adds_dims(args[1])
    if (name not in _VIEWS and not adds_dims) or not _is_alone(args, kwargs):
        return None
    if adds_dims:
        return tuple(function(torch.empty(args[0].shape, device="meta"), args[1]).shape)
    if any(isinstance(item, torch.dtype) for item in args[1:]):
        return None  # the same bits as another dtype
    return _shape_of_view(function, tuple(args[0].shape), _hashable(args[1:]), _hashable(tuple(kwargs.items())))


@functools.lru_cache(_MAX_VIEWS)
def _shape_of_view(
    function: Function, shape: tuple[int, ...], args: tuple[Any, ...], kwargs: tuple[Any, ...]
) -> tuple[int, ...] | None:
    with torch.inference_mode(False):
        view = function(torch.empty(shape, device="meta"), *args, **dict(kwargs))
    return tuple(view.shape)


def _hashable(value: Any) -> Any:
    return tuple([_hashable(item) for item in value]) if isinstance(value, list | tuple) else value


def num_parts_of(old: Sequence[int], new: Sequence[int], dim: int) -> int:
    """How many parts a view makes of a dim, such as 3 of ``[..., 3 * features] -> [..., 3, features]``."""
    before = math.prod(old[:dim])
    lengths = [size for dim, size in enumerate(new) if math.prod(new[:dim]) == before and size > 1]
    return lengths[0] if lengths and old[dim] % lengths[0] == 0 and lengths[0] < old[dim] else 1


def as_merge(
    function: Function, args: Sequence[Any], kwargs: Mapping[str, Any], dim: int, *, num_ranks: int
) -> Reshapes | None:
    """A view that flattens dim `dim` of the first argument, evenly sharded, into the dims before it, or None."""
    new = viewed_shape(function, args, kwargs) if dim > 0 else None
    if new is None:
        return None
    old = args[0].shape
    for first in range(dim):
        count, length = math.prod(old[first:dim]), old[dim]
        at = _place(new, math.prod(old[:first]), count * length, math.prod(old[dim + 1 :]))
        if at is not None and count > 1:
            return Reshapes(shape=tuple(new), parts=Parts(dim=at, sizes=(length,) * count, num_ranks=num_ranks))
    return None


def as_repetition(
    function: Function, args: Sequence[Any], kwargs: Mapping[str, Any], dim: int, *, num_ranks: int
) -> Parts | None:
    """The parts of the result of a call that repeats dim `dim` of the first argument, evenly sharded, or None."""
    if function is not Tensor.repeat or kwargs or not all(type(times) is int for times in args[1:]):
        return None
    if len(args) - 1 != args[0].dim() or args[1 + dim] < 2:
        return None
    return Parts(dim=dim, sizes=(args[0].shape[dim],) * args[1 + dim], num_ranks=num_ranks)


def _cut(parts: Parts, pieces: Sequence[tuple[int, int]], *, is_single: bool) -> Cuts | None:
    edges = [sum(parts.sizes[:i]) for i in range(len(parts.sizes) + 1)]
    if any(edge not in edges for piece in pieces for edge in piece) or any(start == stop for start, stop in pieces):
        return None
    sizes = [parts.sizes[edges.index(start) : edges.index(stop)] for start, stop in pieces]
    made = tuple(Parts(dim=parts.dim, sizes=s, num_ranks=parts.num_ranks) for s in sizes)
    return Cuts(pieces=made, starts=tuple(start for start, _ in pieces), is_single=is_single)


def _viewed(old: tuple[int, ...], new: tuple[int, ...], parts: Parts) -> Reshapes | Opens | None:
    before, after = math.prod(old[: parts.dim]), math.prod(old[parts.dim + 1 :])
    at = _place(new, before, sum(parts.sizes), after)
    if at is not None:
        return Reshapes(shape=new, parts=Parts(dim=at, sizes=parts.sizes, num_ranks=parts.num_ranks))
    count, length = len(parts.sizes), parts.sizes[0]
    at = _place(new, before, count, length * after)
    if at is None or any(size != length for size in parts.sizes):
        return None
    shape = (*new[:at], count, length, *old[parts.dim + 1 :])
    return Opens(shape=shape, dim=at + 1, num_ranks=parts.num_ranks, result=new)


def _place(shape: Sequence[int], before: int, length: int, after: int) -> int | None:
    """The dim of `length` with so many elements before and after it."""
    for dim, size in enumerate(shape):
        if size == length and math.prod(shape[:dim]) == before and math.prod(shape[dim + 1 :]) == after:
            return dim
    return None


def _kept(name: str, args: Sequence[Any], kwargs: Mapping[str, Any], parts_of: PartsOf) -> Keeps | None:
    tensors = list(tensors_in((args, kwargs)))
    found = {(t.dim(), t.shape[p.dim], p) for t in tensors if (p := parts_of(t)) is not None}
    if len(found) != 1:
        return None
    num_dims, length, parts = found.pop()
    if any(tensor.dim() > num_dims for tensor in tensors):
        return None
    along = [(tensor, cut_dim_of(tensor, parts, num_dims)) for tensor in tensors]
    if any(dim is not None and tensor.shape[dim] != length for tensor, dim in along):
        return None
    if name in _BATCHED:
        return Keeps(parts=parts) if parts.dim < num_dims - 2 and all(t.dim() == num_dims for t in tensors) else None
    if name in _IN_PLACE:
        return Keeps(parts=parts, is_in_place=True) if parts_of(args[0]) is not None else None
    return Keeps(parts=parts) if name in _ELEMENTWISE or name == "gather" else None


def cut_dim_of(tensor: Tensor, parts: Parts, num_dims: int) -> int | None:
    """The dim of a plain operand that goes with the parts of a result of `num_dims` dims; None if it is broadcast."""
    dim = parts.dim - num_dims + tensor.dim()
    return dim if dim >= 0 and tensor.shape[dim] != 1 else None


def _is_alone(args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether the first argument is the only tensor."""
    if not args or not isinstance(args[0], Tensor):
        return False
    return next(tensors_in((tuple(args[1:]), dict(kwargs))), None) is None


def _is_slice(index: object) -> bool:
    items = index if isinstance(index, tuple) else (index,)
    return all(isinstance(item, slice) or item is Ellipsis for item in items)


def _adds_dims(index: object) -> bool:
    """Whether an index, such as ``[:, :, None]``, takes all and gives it dims of length 1."""
    items = index if isinstance(index, tuple) else (index,)
    taken = [item for item in items if item is not None and item is not Ellipsis]
    return any(item is None for item in items) and all(isinstance(i, slice) and i == slice(None) for i in taken)


def _with(shape: Sequence[int], dim: int, length: int) -> tuple[int, ...]:
    return (*shape[:dim], length, *shape[dim + 1 :])
