"""Outputs of blocks that stay sharded over the tp axis: logits on the way into the loss, and unread outputs.

[Note: outputs on shards]
A head's column weight gives every tp rank the logits of its own classes. User code gets them as one tensor of the full
shape that holds this rank's part. What becomes of it:

    views that keep the classes together, casts, arithmetic with scalars          a tensor of this class again
    ``F.cross_entropy`` with class indices                                        computed on shards (`loss`)
    anything else                                                                 gathered, once per tensor, and plain

Gradients take the same ways backwards: on shards from the loss, whole from anything else, and they add up where the
output was made. A call that changes such a tensor in place is refused; planning keeps logits whole for steps that do
so. Other outputs, such as attention weights, are left on shards if the traced step does not read them, so that a later
step which does still sees their values.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from lightning_3d.errors import PlanError
from lightning_3d.tensor.axis import MeshAxis
from lightning_3d.tensor.collectives import refuse_second_order
from lightning_3d.tensor.rules.function import Function
from lightning_3d.tensor.sharded_tensor import ShardedTensor, shard_dim
from lightning_3d.tensor.vocabulary import loss as vocabulary_loss
from lightning_3d.tensor.vocabulary.loss import CrossEntropy, Saved, as_cross_entropy, shard_bounds
from lightning_3d.torch_internals.dispatch import (
    RESHAPE_ALIAS,
    TO_COPY,
    UNSAFE_VIEW,
    DisableTorchFunctionSubclass,
    OpOverload,
    written_arguments,
)
from lightning_3d.torch_internals.pytree import tree_leaves, tree_map
from lightning_3d.torch_internals.tensors import make_wrapper

_aten = torch.ops.aten

_READ_MEMORY = frozenset(
    {
        Tensor.numpy,
        Tensor.tolist,
        Tensor.data_ptr,
        Tensor.untyped_storage,
        Tensor.share_memory_,
        Tensor.__array__,
        Tensor.__deepcopy__,
        Tensor.__dlpack__,
        Tensor.__reduce_ex__,
        Tensor.__repr__,
    }
)
"""Methods that reach for a tensor's memory without an operator that could be answered."""


class ShardedOutput(Tensor):
    """Equal on all tp ranks as a full tensor; holds this rank's part.

    Args:
        local: This rank's part.
        mesh: The tp axis.
        sharded_dim: The dim that is cut, of logits that of the classes.
        length: The full length of that dim.
    """

    local: Tensor
    mesh: DeviceMesh
    sharded_dim: int
    _whole: Tensor | None
    _origin: tuple[ShardedOutput, Callable[[Tensor], Tensor]] | None

    @staticmethod
    def __new__(cls, local: Tensor, mesh: DeviceMesh, sharded_dim: int, length: int) -> ShardedOutput:
        shape = list(local.shape)
        shape[sharded_dim] = length
        strides = _full_strides(local, sharded_dim, length)
        if strides is None:
            local = local.contiguous()
            strides = _contiguous_strides(shape)
        tensor: ShardedOutput = make_wrapper(cls, shape, strides=strides, dtype=local.dtype, device=local.device)
        tensor.local, tensor.mesh, tensor.sharded_dim = local, mesh, sharded_dim
        tensor._whole, tensor._origin = None, None
        return tensor

    def like(self, local: Tensor, sharded_dim: int) -> ShardedOutput:
        """Another part of an output of the same length."""
        return ShardedOutput(local, self.mesh, sharded_dim, self.shape[self.sharded_dim])

    def whole(self) -> Tensor:
        """The full tensor, without autograd; a collective of the tp axis, unless it or its origin has been gathered."""
        if self._whole is None and self._origin is not None and self._origin[0].is_gathered:
            logits, make = self._origin
            self._whole = make(logits.whole())
        if self._whole is None:
            length = self.shape[self.sharded_dim]
            longest = -(-length // self.mesh.size())
            part = self.local.movedim(self.sharded_dim, 0)
            padded = part.new_zeros(longest, *part.shape[1:])
            padded[: part.shape[0]] = part
            gathered = padded.new_empty(longest * self.mesh.size(), *part.shape[1:])
            dist.all_gather_single(gathered, padded, group=self.mesh.get_group())
            self._whole = torch.empty_strided(self.shape, self.stride(), dtype=self.dtype, device=self.device)
            self._whole.copy_(gathered[:length].movedim(0, self.sharded_dim))
        return self._whole

    @property
    def is_gathered(self) -> bool:
        """Whether `whole` communicates nothing."""
        return self._whole is not None or (self._origin is not None and self._origin[0].is_gathered)

    def comes_from(self, logits: ShardedOutput, make: Callable[[Tensor], Tensor]) -> None:
        """Note that the whole of this is `make` of the whole of `logits`, so that it need not be gathered."""
        self._origin = logits, make

    @classmethod
    def __torch_function__(cls, func: Function, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        call = as_cross_entropy(func, args, kwargs)
        if call is not None and cls._runs_on_shards(call):
            return _CrossEntropy.apply(call.input, call)  # type: ignore[no-untyped-call]  # torch 2.13
        if func in _READ_MEMORY:
            args, kwargs = tree_map(plain, (args, kwargs))
        with DisableTorchFunctionSubclass():
            return func(*args, **kwargs)

    @classmethod
    def _runs_on_shards(cls, call: CrossEntropy) -> bool:
        others = isinstance(call.target, cls) or isinstance(call.weight, cls)
        return isinstance(call.input, cls) and call.input.sharded_dim == call.class_dim and not others

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch declares an instance method
        cls, func: OpOverload, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        first = args[0] if args else None
        if func in _ON_SHARDS and isinstance(first, cls):
            local = _ON_SHARDS[func](first, func, *args[1:], **kwargs)
            if local is not None and first.is_gathered:
                local.comes_from(first, lambda whole: func(whole, *args[1:], **kwargs))
            if local is not None:
                return local
        if torch.Tag.pointwise in func.tags and (pointwise := _pointwise(func, args, kwargs)) is not None:
            return pointwise
        _refuse_changes(func, args, kwargs)
        args, kwargs = tree_map(lambda leaf: leaf.whole() if isinstance(leaf, cls) else leaf, (args, kwargs))
        return func(*args, **kwargs)


def as_logits(local: Tensor, mesh: DeviceMesh, num_classes: int, *, gather: bool = False) -> Tensor:
    """The outputs ``[..., own classes]`` of a head's shard as logits ``[..., num_classes]``.

    Args:
        local: This rank's outputs.
        mesh: The tp axis.
        num_classes: The number over all ranks.
        gather: Whether to gather them now; the loss runs on shards nevertheless.
    """
    logits = _enter(local, mesh, local.dim() - 1, num_classes)
    if gather:
        logits.whole()
    return logits


def as_unread(activation: ShardedTensor) -> Tensor:
    """An evenly sharded output that nothing is known to read; whatever reads it gathers it."""
    dim, axis = shard_dim(activation), activation.axis
    assert dim is not None
    assert isinstance(axis, MeshAxis)
    return _enter(activation.own(), axis.mesh, dim, activation.shape[dim])


def plain(leaf: Any) -> Any:
    """An output on shards as a plain tensor, a collective of the tp axis; anything else as it is."""
    return _Plain.apply(leaf) if isinstance(leaf, ShardedOutput) else leaf  # type: ignore[no-untyped-call]


# ------------------------------------------------------------------------------------------------------- autograd


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, local: Tensor, mesh: DeviceMesh, dim: int, length: int) -> Tensor:
        ctx.mesh, ctx.dim, ctx.length = mesh, dim, length
        return ShardedOutput(local.detach(), mesh, dim, length)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        if isinstance(gradient, ShardedOutput) and gradient.sharded_dim == ctx.dim:
            return gradient.local, None, None, None
        start, stop = shard_bounds(ctx.length, ctx.mesh)
        return plain(gradient).narrow(ctx.dim, start, stop - start).contiguous(), None, None, None


def _enter(local: Tensor, mesh: DeviceMesh, dim: int, length: int) -> ShardedOutput:
    return cast(ShardedOutput, _Enter.apply(local, mesh, dim, length))  # type: ignore[no-untyped-call]  # torch 2.13


class _Plain(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: ShardedOutput) -> Tensor:
        return logits.whole().clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: ShardedOutput, call: CrossEntropy) -> Tensor:
        moved = logits.local.movedim(logits.sharded_dim, -1)
        ctx.mesh, ctx.sharded_dim, ctx.num_classes = logits.mesh, logits.sharded_dim, logits.shape[logits.sharded_dim]
        ctx.moved_shape, ctx.dtype = moved.shape, logits.dtype
        loss, saved = vocabulary_loss.forward(call, moved.reshape(-1, moved.shape[-1]), ctx.num_classes, ctx.mesh)
        ctx.save_for_backward(*(getattr(saved, field.name) for field in fields(saved)))
        is_autocast = torch.is_autocast_enabled(logits.device.type)
        loss = loss.to(loss.dtype if is_autocast else logits.dtype)
        return loss.reshape(call.target.shape if loss.dim() else ()).clone()  # no view: it may be changed in place

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        refuse_second_order("a cross entropy on sharded logits")
        names = [field.name for field in fields(Saved)]
        saved = Saved(**dict(zip(names, ctx.saved_tensors, strict=True)))
        local = vocabulary_loss.backward(saved, gradient).to(ctx.dtype)
        local = local.reshape(ctx.moved_shape).movedim(-1, ctx.sharded_dim)
        return ShardedOutput(local, ctx.mesh, ctx.sharded_dim, ctx.num_classes), None


# ------------------------------------------------------------------------------------------ operators on shards

_OnShards = Callable[..., ShardedOutput | None]
"""Answers an operator, given the logits, the operator and its other arguments; None if it needs the whole."""


def _same(logits: ShardedOutput, func: OpOverload, **kwargs: Any) -> ShardedOutput | None:
    if kwargs.get("device") not in (None, logits.device):
        return None
    return logits.like(func(logits.local, **kwargs), logits.sharded_dim)


def _view(logits: ShardedOutput, func: OpOverload, shape: Sequence[int], *strides: Any) -> ShardedOutput | None:
    wanted = list(shape)
    if -1 in wanted:
        wanted[wanted.index(-1)] = logits.numel() // max(-math.prod(wanted), 1)
    before, num_classes = math.prod(logits.shape[: logits.sharded_dim]), logits.shape[logits.sharded_dim]
    for dim, length in enumerate(wanted):
        if length == num_classes and math.prod(wanted[:dim]) == before:
            wanted[dim] = logits.local.shape[logits.sharded_dim]
            return logits.like(logits.local.reshape(wanted), dim)
    return None


def _along_dim(logits: ShardedOutput, func: OpOverload, dim: int = 0, *rest: Any) -> ShardedOutput | None:
    """Slice, select and squeeze, the last two of which drop the dim."""
    dim %= logits.dim()
    if dim == logits.sharded_dim:
        return None
    local = func(logits.local, dim, *rest)
    is_dropped = local.dim() < logits.dim() and dim < logits.sharded_dim
    return logits.like(local, logits.sharded_dim - is_dropped)


def _slice_backward(
    gradient: ShardedOutput, func: OpOverload, shape: Sequence[int], dim: int, *rest: Any
) -> ShardedOutput | None:
    """Also of select, whose result lacks the dim."""
    dim %= len(shape)
    sharded_dim = gradient.sharded_dim
    if func is _aten.select_backward.default and dim <= sharded_dim:
        sharded_dim += 1
    if dim == sharded_dim:
        return None
    own_shape = list(shape)
    own_shape[sharded_dim] = gradient.local.shape[gradient.sharded_dim]
    return gradient.like(func(gradient.local, own_shape, dim, *rest), sharded_dim)


def _unsqueeze(logits: ShardedOutput, func: OpOverload, dim: int) -> ShardedOutput:
    dim %= logits.dim() + 1
    return logits.like(func(logits.local, dim), logits.sharded_dim + (dim <= logits.sharded_dim))


def _transpose(logits: ShardedOutput, func: OpOverload, *dims: int) -> ShardedOutput:
    order = list(range(logits.dim()))
    first, second = dims or (0, -1)  # none: `t`
    order[first], order[second] = order[second], order[first]
    return _permute(logits, _aten.permute.default, order)


def _permute(logits: ShardedOutput, func: OpOverload, dims: Sequence[int]) -> ShardedOutput:
    order = [dim % logits.dim() for dim in dims]
    return logits.like(func(logits.local, order), order.index(logits.sharded_dim))


_ON_SHARDS: Mapping[OpOverload, _OnShards] = {
    _aten.alias.default: _same,
    _aten.clone.default: _same,
    _aten.detach.default: _same,
    TO_COPY: _same,
    _aten.view.default: _view,
    UNSAFE_VIEW: _view,
    RESHAPE_ALIAS: _view,
    _aten.slice.Tensor: _along_dim,
    _aten.slice_backward.default: _slice_backward,
    _aten.select.int: _along_dim,
    _aten.select_backward.default: _slice_backward,
    _aten.unsqueeze.default: _unsqueeze,
    _aten.squeeze.dim: _along_dim,
    _aten.transpose.int: _transpose,
    _aten.t.default: _transpose,
    _aten.permute.default: _permute,
}


def _pointwise(func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> ShardedOutput | None:
    """An elementwise operator on logits that are cut alike and on tensors that are the same for all classes."""
    leaves = tree_leaves((args, kwargs))
    first = next(leaf for leaf in leaves if isinstance(leaf, ShardedOutput))
    if written_arguments(func, args, kwargs) or torch.Tag.nondeterministic_seeded in func.tags:
        return None
    if not all(_goes_with(first, leaf) for leaf in leaves if isinstance(leaf, Tensor)):
        return None
    own_args, own_kwargs = tree_map(
        lambda leaf: leaf.local if isinstance(leaf, ShardedOutput) else leaf, (args, kwargs)
    )
    result = first.like(func(*own_args, **own_kwargs), first.sharded_dim)
    if first.is_gathered and all(leaf is first for leaf in leaves if isinstance(leaf, Tensor)):
        result.comes_from(
            first, lambda whole: func(*tree_map(lambda leaf: whole if leaf is first else leaf, args), **kwargs)
        )
    return result


def _goes_with(logits: ShardedOutput, other: Tensor) -> bool:
    if isinstance(other, ShardedOutput):
        return other.shape == logits.shape and other.sharded_dim == logits.sharded_dim
    missing = logits.dim() - other.dim()
    lengths = [1] * missing + list(other.shape)
    return (
        missing >= 0
        and lengths[logits.sharded_dim] == 1
        and all(length in (1, full) for length, full in zip(lengths, logits.shape, strict=True))
    )


def _refuse_changes(func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    if any(isinstance(leaf, ShardedOutput) for leaf in tree_leaves(written_arguments(func, args, kwargs))):
        raise PlanError(
            f"{func} changes an output of a block in place that tensor parallel keeps sharded; the step did not do so"
            " when it was traced. Write y = f(x) for it, or do it on every step."
        )


# --------------------------------------------------------------------------------------------------------- strides


def _full_strides(local: Tensor, sharded_dim: int, full_length: int) -> list[int] | None:
    """The strides of the full tensor, laid out in memory as this rank's part is; None for a layout that has none."""
    shape = list(local.shape)
    length, shape[sharded_dim] = shape[sharded_dim], full_length
    if local.is_contiguous():
        return _contiguous_strides(shape)
    others = [stride for dim, stride in enumerate(local.stride()) if dim != sharded_dim]
    if local.stride(sharded_dim) != 1 or length == 0 or any(stride % length for stride in others):
        return None
    strides = [stride // length * full_length for stride in local.stride()]
    strides[sharded_dim] = 1
    return strides


def _contiguous_strides(shape: Sequence[int]) -> list[int]:
    return [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
