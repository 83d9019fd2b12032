"""Logits that are made when somebody reads them; a cross entropy does not (`chunked_loss`).

[Note: lazy logits]
A head gives a tensor of the shape of its logits that holds the head's input rows and its weights. What becomes of it:

    views that keep the classes together, casts, scaling, tanh      a tensor of this class again, of other rows
    ``F.cross_entropy`` with class indices                           computed in chunks of rows
    shape, dtype, device and the like                                answered
    anything else                                                    the head runs, once per call of it, and is plain

Whoever reads logits has those that the head would have made: in the autocast state of its call, with their graph. All
views of them are then views of the same memory. Code that no function mode sees, such as a custom autograd function,
finds a tensor with a graph of its own, and operators compute with its data.

Where classes are sharded over the tp axis, logits that are read are [Note: outputs on shards]. Their loss is computed
in chunks nevertheless: one rank may read them alone, while the loss takes all.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.graph import Node, saved_tensors_hooks

from lightning_3d.errors import StepError
from lightning_3d.tensor.collectives import refuse_second_order
from lightning_3d.tensor.rules.function import Function
from lightning_3d.tensor.vocabulary.chunked_loss import Elementwise, Head, cross_entropy_of
from lightning_3d.tensor.vocabulary.loss import CrossEntropy, ShardedClasses, as_cross_entropy
from lightning_3d.tensor.vocabulary.sharded_output import as_logits, plain
from lightning_3d.torch_internals.autograd import has_saved_tensor_hooks
from lightning_3d.torch_internals.dispatch import DisableTorchFunctionSubclass, OpOverload, autograd_recording
from lightning_3d.torch_internals.pytree import tree_leaves, tree_map
from lightning_3d.torch_internals.tensors import make_wrapper
from lightning_3d.trace.interception import reads_meta_only

Compute = Callable[[Tensor, Tensor, Tensor | None], Tensor]
"""Computes something of rows, and of the weight and bias of a head."""
Through = Callable[[Tensor, Compute], Tensor]
"""Computes something of rows where the weight and bias of a head are whole."""
OnRead = Callable[[str], None]
"""Called with the name of the function when logits are made in full."""


@dataclass(slots=True)
class Outcome:
    """The end of a call of a head."""

    has_grad: bool
    is_plain: bool = False
    """Whether its logits went on as plain tensors, as somebody read them or waits for their gradient."""


class HeadCall:
    """One call of a head, whose logits are made at most once.

    Args:
        rows: What the head was given, ``[..., width]``; of sharded classes, it sums the gradients of all ranks.
        weight: ``[classes, width]``, of this rank's classes; None if it is whole in ``through`` alone.
        on_read: Called when they are made.
        classes: All classes, where a rank has a part of them.
        num_classes: The number over all ranks, if it is not that of ``weight``.
    """

    def __init__(
        self,
        rows: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        on_read: OnRead,
        classes: ShardedClasses | None = None,
        *,
        num_classes: int | None = None,
        through: Through | None = None,
    ) -> None:
        self.rows, self.weight, self.bias, self.classes, self._on_read = rows, weight, bias, classes, on_read
        self._num_classes, self._through = num_classes, through
        device = rows.device.type
        self._autocast = torch.is_autocast_enabled(device)
        self._autocast_dtype = torch.get_autocast_dtype(device)
        self.outcome = Outcome(torch.is_grad_enabled())
        self.made: Tensor | None = None
        self.is_fused = False
        """Whether a loss was computed without the logits."""
        self.views: list[weakref.ref[Tensor]] = []
        """The lazy tensors that come of it."""

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the logits."""
        is_cast = self._autocast and self.rows.dtype in (torch.float32, torch.float16, torch.bfloat16)
        return self._autocast_dtype if is_cast else self.rows.dtype

    @property
    def num_classes(self) -> int:
        """The number over all ranks."""
        if self._num_classes is not None:
            return self._num_classes
        assert self.weight is not None
        return len(self.weight) if self.classes is None else self.classes.num

    def run(self, rows: Tensor, compute: Compute) -> Tensor:
        """Compute something of rows with the weights."""
        if self._through is not None:
            return self._through(rows, compute)
        assert self.weight is not None
        return compute(rows, self.weight, self.bias)

    def end(self) -> None:
        """Make those that somebody still refers to, before the weights change."""
        for reference in self.views:
            made(reference())

    def logits(self, reader: str) -> Tensor:
        """The logits as the head makes them, on shards if the classes are sharded."""
        if self.made is None:
            self._on_read(reader)
            self.outcome.is_plain |= self.classes is None
            device = self.rows.device.type
            with (
                DisableTorchFunctionSubclass(),
                torch.set_grad_enabled(self.outcome.has_grad),
                torch.autocast(device, dtype=self._autocast_dtype, enabled=self._autocast),
            ):
                self.made = self.run(self.rows, self._make)
        return self.made

    def _make(self, rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        made = F.linear(rows, weight, bias)
        return made if self.classes is None else as_logits(made, self.classes.mesh, self.classes.num)


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

    @property
    def shape(self) -> list[int]:
        """The shape of the tensor."""
        shape = list(self.rows.shape[:-1])
        shape.insert(self.class_dim, self.call.num_classes)
        return shape


class LazyLogits(Tensor):
    """Logits that are not there yet; see [Note: lazy logits]."""

    view_of_head: View
    _plain: Tensor | None
    _node: Node | None

    @staticmethod
    def __new__(cls, view: View) -> LazyLogits:
        tensor: LazyLogits = make_wrapper(cls, view.shape, dtype=view.dtype, device=view.rows.device)
        tensor.view_of_head, tensor._plain, tensor._node = view, None, None
        return tensor

    def plain(self, reader: str) -> Tensor:
        """The logits, with their graph."""
        if self._plain is None:
            with _kept_as_by_the_head():
                self._plain = self.view_of_head.make(reader)
        return self._plain if self.has_own_graph else _Read.apply(self, self._plain)  # type: ignore[no-untyped-call]

    @property
    def has_own_graph(self) -> bool:
        """Whether it is no output of somebody's autograd function, whose backward its gradient has to go through."""
        with DisableTorchFunctionSubclass():
            return self.grad_fn is self._node

    @classmethod
    @torch.compiler.disable  # type: ignore[untyped-decorator]  # compiled code that reads them leaves its graph for it
    def __torch_function__(cls, func: Function, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        first = args[0] if args else None
        if isinstance(first, cls) and first.is_untouched:
            if reads_meta_only(func) and func not in _NOT_ANSWERED:
                with DisableTorchFunctionSubclass():
                    return func(*args, **kwargs)
            if (step := _CARRIED.get(func)) is not None and (view := step(first, func, args[1:], kwargs)) is not None:
                return _lazily(view)
        call = as_cross_entropy(func, args, kwargs)
        if call is not None and isinstance(call.input, cls) and _can_fuse(call):
            return _fused(call)
        if func is Tensor.__hash__:
            return id(first)
        name = getattr(func, "__name__", str(func))
        if func in _ASK_FOR_GRADIENTS:
            _hook(name, args, kwargs)
        args, kwargs = tree_map(lambda leaf: leaf.plain(name) if isinstance(leaf, cls) else leaf, (args, kwargs))
        return func(*args, **kwargs)

    @property
    def is_untouched(self) -> bool:
        """Whether nobody has read the logits of its head's call, so that they may differ now."""
        call = self.view_of_head.call
        return not call.outcome.is_plain and self.has_own_graph

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch declares an instance method
        cls, func: OpOverload, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        name = str(func)
        with autograd_recording():  # whoever reads them next gets the same tensor
            args, kwargs = tree_map(
                lambda leaf: leaf.plain(name).detach() if isinstance(leaf, cls) else leaf, (args, kwargs or {})
            )
        return func(*args, **kwargs)


def _kept_as_by_the_head() -> AbstractContextManager[Any]:
    """Logits may be read first inside of a checkpoint, which is not to count what the head before it keeps."""
    if not has_saved_tensor_hooks():
        return nullcontext()
    return saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor)  # the innermost ones hold


def lazy_logits(call: HeadCall) -> Tensor:
    """The output of a head as a tensor whose values come when they are read."""
    last = call.rows.dim() - 1
    return _lazily(View(call=call, rows=call.rows, class_dim=last, then=(), dtype=call.dtype, make=call.logits))


def made(leaf: Any, reader: str = "the end of the step") -> Any:
    """Lazy logits as a plain tensor, for the function of that name; anything else as it is."""
    return leaf.plain(reader) if isinstance(leaf, LazyLogits) else leaf


def _lazily(view: View) -> LazyLogits:
    logits = cast(LazyLogits, _Enter.apply(view.rows, view.call.weight, view.call.bias, view))  # type: ignore[no-untyped-call]
    with DisableTorchFunctionSubclass():
        logits._node = logits.grad_fn
    view.call.views.append(weakref.ref(logits))
    return logits


class _Enter(torch.autograd.Function):
    """The graph of logits for code that computes with them unseen."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor, bias: Tensor | None, view: View) -> Tensor:
        ctx.then, ctx.dtype, ctx.classes, ctx.class_dim = view.then, view.call.dtype, view.call.classes, view.class_dim
        ctx.save_for_backward(rows, weight, bias)
        return LazyLogits(view)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None]:
        refuse_second_order("logits that a custom autograd function reads")
        leaves = [_leaf(tensor) for tensor in ctx.saved_tensors]
        rows, weight, bias = leaves
        if weight is None:
            raise StepError(
                "torch.func, or C++ code, read logits beneath torch's functions, and their gradient needs a weight that"
                " is gathered only while its head runs (zero.stage=3): set activations.fused_loss='never'."
            )
        if ctx.classes is not None:
            start, stop = ctx.classes.bounds
            gradient = plain(gradient).narrow(ctx.class_dim, start, stop - start)
        with torch.enable_grad():
            head = Head(weight=weight, bias=bias, dtype=ctx.dtype, then=ctx.then, classes=ctx.classes).cast()
            logits = head.after(head.logits(rows.to(head.dtype))).movedim(-1, ctx.class_dim)
        asked = [leaf for leaf in leaves if leaf is not None and leaf.requires_grad]
        found = iter(torch.autograd.grad(logits, asked, gradient))
        made = [next(found) if leaf is not None and leaf.requires_grad else None for leaf in leaves]
        return made[0], made[1], made[2], None


class _Read(torch.autograd.Function):
    """Lazy logits, values -> the values, with the graph of the logits."""

    @staticmethod
    def forward(ctx: Any, logits: LazyLogits, values: Tensor) -> Tensor:
        return values.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


def _leaf(tensor: Any) -> Any:
    return None if tensor is None else tensor.detach().requires_grad_(tensor.requires_grad)


# ------------------------------------------------------------------------------------------------------- the loss


def _can_fuse(call: CrossEntropy) -> bool:
    logits = cast(LazyLogits, call.input)
    others = isinstance(call.target, LazyLogits) or isinstance(call.weight, LazyLogits)
    return (
        logits.is_untouched
        and not others
        and logits.view_of_head.class_dim == call.class_dim
        and logits.view_of_head.rows.numel() > 0
        and call.target.device == logits.device
    )


def _fused(call: CrossEntropy) -> Tensor:
    view = cast(LazyLogits, call.input).view_of_head
    view.call.is_fused = True
    then, dtype, classes = view.then, view.call.dtype, view.call.classes
    while then and then[-1] == _Cast(torch.promote_types(dtype, torch.float32)):  # as the loss does by itself
        then = then[:-1]

    def compute(rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return cross_entropy_of(rows, Head(weight=weight, bias=bias, dtype=dtype, then=then, classes=classes), call)

    loss = view.call.run(view.rows.reshape(-1, view.rows.shape[-1]), compute)
    is_autocast = torch.is_autocast_enabled(view.rows.device.type)
    loss = loss.to(loss.dtype if is_autocast else view.dtype)
    return loss.reshape(call.target.shape if loss.dim() else ())


_ASK_FOR_GRADIENTS = frozenset({Tensor.register_hook, Tensor.retain_grad, torch.autograd.grad, torch.autograd.backward})


def _hook(name: str, args: Any, kwargs: Any) -> None:
    """Note that the gradient of logits is asked for; refuse it where it is too late."""
    calls = [leaf.view_of_head.call for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, LazyLogits)]
    if any(call.is_fused for call in calls):
        raise StepError(
            f"{name} asks for the gradient of logits after their cross entropy was computed, fused with the head, which"
            " makes no such gradient. Call it before the loss, or set activations.fused_loss='never'."
        )
    for call in calls:
        call.outcome.is_plain = True


# ---------------------------------------------------------------------------------------------------- lazy calls

Carry = Callable[[LazyLogits, Function, Sequence[Any], Mapping[str, Any]], "View | None"]
"""Answers a call by another view of the logits; None if it needs them."""


def _derived(
    logits: LazyLogits, func: Function, args: Sequence[Any], kwargs: Mapping[str, Any], **changes: Any
) -> View:
    has_grad = torch.is_grad_enabled()

    def make(reader: str) -> Tensor:
        with torch.set_grad_enabled(has_grad):
            made: Tensor = func(logits.plain(reader), *args, **kwargs)
        return made

    return replace(logits.view_of_head, make=make, **changes)


def _index(logits: LazyLogits, func: Function, args: Sequence[Any], kwargs: Mapping[str, Any]) -> View | None:
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


def _reshape(logits: LazyLogits, func: Function, args: Sequence[Any], kwargs: Mapping[str, Any]) -> View | None:
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


def _flatten(logits: LazyLogits, func: Function, args: Sequence[Any], kwargs: Mapping[str, Any]) -> View | None:
    view = logits.view_of_head
    bounds = dict(zip(("start_dim", "end_dim"), args, strict=False)) | dict(kwargs)
    start, end = (bounds.pop(name, default) % view.rows.dim() for name, default in (("start_dim", 0), ("end_dim", -1)))
    if bounds or view.class_dim != view.rows.dim() - 1 or end >= view.class_dim:
        return None
    rows = view.rows.flatten(start, end)
    return _derived(logits, func, args, kwargs, rows=rows, class_dim=rows.dim() - 1)


def _transpose(logits: LazyLogits, func: Function, args: Sequence[Any], kwargs: Mapping[str, Any]) -> View | None:
    if kwargs or len(args) != 2:
        return None
    order = list(range(logits.view_of_head.rows.dim()))
    first, second = args
    order[first], order[second] = order[second], order[first]
    return _ordered(logits, func, args, order)


def _permute(logits: LazyLogits, func: Function, args: Sequence[Any], kwargs: Mapping[str, Any]) -> View | None:
    dims = args[0] if len(args) == 1 and isinstance(args[0], (tuple, list)) else args
    if kwargs or len(dims) != logits.view_of_head.rows.dim():
        return None
    return _ordered(logits, func, args, [dim % len(dims) for dim in dims])


def _ordered(logits: LazyLogits, func: Function, args: Sequence[Any], order: Sequence[int]) -> View:
    view = logits.view_of_head
    last = len(order) - 1
    places = [last if dim == view.class_dim else dim - (dim > view.class_dim) for dim in order]  # of the rows' dims
    others = [place for place in places if place != last]
    rows = view.rows.permute(*others, last)
    return _derived(logits, func, args, {}, rows=rows, class_dim=places.index(last))


def _same(logits: LazyLogits, func: Function, args: Sequence[Any], kwargs: Mapping[str, Any]) -> View | None:
    return None if args or kwargs else _derived(logits, func, args, kwargs)


@dataclass(frozen=True, slots=True)
class _Cast:
    dtype: torch.dtype

    def __call__(self, logits: Tensor) -> Tensor:
        return logits.to(self.dtype)


def _to(logits: LazyLogits, func: Function, args: Sequence[Any], kwargs: Mapping[str, Any]) -> View | None:
    if func is Tensor.float and not args and not kwargs:
        dtype: Any = torch.float32
    elif func is Tensor.to and len(args) == 1 and not kwargs:
        dtype = args[0]
    else:
        return None
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        return None
    view = logits.view_of_head
    then = view.then if dtype == view.dtype else (*view.then, _Cast(dtype))
    return _derived(logits, func, args, kwargs, then=then, dtype=dtype)


def _elementwise(logits: LazyLogits, func: Function, args: Sequence[Any], kwargs: Mapping[str, Any]) -> View | None:
    if kwargs or not all(type(arg) in (int, float) for arg in args):
        return None
    view = logits.view_of_head
    return _derived(logits, func, args, kwargs, then=(*view.then, lambda chunk: func(chunk, *args)))


_CARRIED: Mapping[Function, Carry] = {
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

_NOT_ANSWERED = frozenset({Tensor.register_hook, Tensor.__repr__})
"""Exceptions from the functions that ask for shape, dtype and the like."""
