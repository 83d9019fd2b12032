"""Logits that are made when somebody reads them; a cross entropy does not (`chunked_loss`).

[Note: lazy logits]
A head gives a tensor of the shape of its logits that holds the head's input rows and its weights. What becomes of it:

    views that keep the classes together, casts, scaling, tanh      a tensor of this class again, of other rows
    ``log_softmax`` of the classes                                   likewise, as logarithms of probabilities
    ``F.cross_entropy`` with class indices; ``F.nll_loss`` of those  computed in chunks of rows
    shape, dtype, device and the like                                answered
    anything else                                                    the head runs, once per call of it, and is plain

Whoever reads logits has those that the head would have made: in the autocast state of its call, with their graph. All
views of them are then views of the same memory. Code that no function mode sees, such as a custom autograd function,
finds a tensor with a graph of its own, and operators compute with its data.

Where classes are sharded over the tp axis, logits that are read are [Note: outputs on shards]. Their loss is computed
in chunks nevertheless: one rank may read them alone, while the loss takes all.
"""

from __future__ import annotations

import weakref
from contextlib import AbstractContextManager, nullcontext
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.graph import Node, saved_tensors_hooks

from lightning_3d.errors import StepError
from lightning_3d.tensor.collectives import refuse_second_order
from lightning_3d.tensor.rules.function import Function
from lightning_3d.tensor.vocabulary.carried import CARRIED, Cast, View
from lightning_3d.tensor.vocabulary.chunked_loss import Head, cross_entropy_of
from lightning_3d.tensor.vocabulary.head_call import AT_END, HeadCall
from lightning_3d.tensor.vocabulary.loss import CrossEntropy, as_cross_entropy, log_sums
from lightning_3d.tensor.vocabulary.sharded_output import plain
from lightning_3d.torch_internals.autograd import has_saved_tensor_hooks
from lightning_3d.torch_internals.dispatch import DisableTorchFunctionSubclass, OpOverload, autograd_recording
from lightning_3d.torch_internals.pytree import tree_leaves, tree_map
from lightning_3d.torch_internals.tensors import are_transforms_active, make_wrapper
from lightning_3d.trace.interception import reads_meta_only


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
            if (step := CARRIED.get(func)) is not None and (view := step(first, func, args[1:], kwargs)) is not None:
                return _lazily(view)
        if (call := _as_loss(func, args, kwargs)) is not None and _can_fuse(call):
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
        return not call.outcome.is_plain and self.has_own_graph and not are_transforms_active()

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


def made(leaf: Any, reader: str = AT_END) -> Any:
    """Lazy logits as a plain tensor, for the function of that name; anything else as it is."""
    return leaf.plain(reader) if isinstance(leaf, LazyLogits) else leaf


def whole(leaf: Any) -> Any:
    """The values of logits that are not there yet, or sharded over the vocabulary; anything else as it is."""
    return plain(made(leaf))


def _lazily(view: View) -> LazyLogits:
    logits = cast(LazyLogits, _Enter.apply(view.rows, view.call.weight, view.call.bias, view))  # type: ignore[no-untyped-call]
    with DisableTorchFunctionSubclass():
        logits._node = logits.grad_fn
    reference = weakref.ref(logits)
    view.call.at_end.append(lambda: made(reference()))
    return logits


class _Enter(torch.autograd.Function):
    """The graph of logits for code that computes with them unseen."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor, bias: Tensor | None, view: View) -> Tensor:
        ctx.then, ctx.dtype, ctx.classes, ctx.class_dim = view.then, view.call.dtype, view.call.classes, view.class_dim
        ctx.is_log = view.is_log
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
        gradient = plain(gradient).movedim(ctx.class_dim, -1)
        total = gradient.sum(-1, keepdim=True)
        if ctx.classes is not None:
            start, stop = ctx.classes.bounds
            gradient = gradient[..., start:stop]
        with torch.enable_grad():
            head = Head(weight=weight, bias=bias, dtype=ctx.dtype, then=ctx.then, classes=ctx.classes).cast()
            logits = head.after(head.logits(rows.to(head.dtype)))
        if ctx.is_log:
            values = logits.detach().to(gradient.dtype)
            mesh = None if ctx.classes is None else ctx.classes.mesh
            gradient = (gradient - total * (values - log_sums(values, mesh)).exp()).to(logits.dtype)
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


def _as_loss(func: Function, args: Any, kwargs: Any) -> CrossEntropy | None:
    """Read a call as the cross entropy of lazy logits."""
    call = as_cross_entropy(func, args, kwargs)  # of logarithms of probabilities it is the same
    call = as_cross_entropy(func, args, kwargs, of=F.nll_loss) if call is None else call
    if call is None or not isinstance(call.input, LazyLogits):
        return None
    return call if func is F.cross_entropy or call.input.view_of_head.is_log else None


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
    while then and then[-1] == Cast(torch.promote_types(dtype, torch.float32)):  # as the loss does by itself
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


_NOT_ANSWERED = frozenset({Tensor.register_hook, Tensor.__repr__})
"""Exceptions from the functions that ask for shape, dtype and the like."""
