"""Tensors whose values are made when somebody reads them: logits, and outputs on shards that nothing is known to read.

[Note: lazy tensors]
A head gives a tensor of the shape of its logits that holds the head's input and its weights, or, where its block has
run on shards, the logits of this rank's classes. What becomes of it:

    views that keep the classes together, casts, scaling, tanh      a tensor of this class again, of other rows
    ``log_softmax`` of the classes                                   likewise, as logarithms of probabilities
    ``F.cross_entropy`` with class indices; ``F.nll_loss`` of those  computed in chunks of rows, on shards if sharded
    shape, dtype, device and the like                                answered
    anything else                                                    they are made, once per call of the head, and plain

Other outputs of sharded blocks, such as attention weights, are lazy if the traced step does not read them, so that a
later step which does still sees their values; all that can be done with them is to read them.

Values that take other ranks are made at once where there are no gradients, as in evaluations: there it is common that
one rank alone reads them, as to print a sample, and the others could not know.

Whoever reads a lazy tensor has what the block would have given: in the autocast state of its call, with its graph,
gathered over the tp axis. All views of logits are then views of the same memory. Code that no function mode sees, such
as a custom autograd function, finds a tensor with a graph of its own, and operators compute with its data.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from typing import Any, TypeGuard, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.graph import Node, saved_tensors_hooks

from lightning_3d.activations.collective_mode import unseen_by_checkpoints
from lightning_3d.errors import StepError
from lightning_3d.sharding.collectives import redistribute
from lightning_3d.sharding.placement import REPLICATE
from lightning_3d.sharding.rules.function import Function
from lightning_3d.sharding.sharded_tensor import ShardedTensor
from lightning_3d.tensor.own_shard import refuse_second_order
from lightning_3d.tensor.vocabulary.chunked_loss import Head, cross_entropy_of
from lightning_3d.tensor.vocabulary.head_call import AT_CALL, AT_END, HeadCall
from lightning_3d.tensor.vocabulary.logits_view import Cast, View
from lightning_3d.tensor.vocabulary.loss import CrossEntropy, as_cross_entropy
from lightning_3d.torch_internals.autograd import has_saved_tensor_hooks
from lightning_3d.torch_internals.dispatch import DisableTorchFunctionSubclass, OpOverload, autograd_recording
from lightning_3d.torch_internals.fsdp import is_hook_of_fsdp
from lightning_3d.torch_internals.pytree import tree_leaves, tree_map
from lightning_3d.torch_internals.tensors import are_transforms_active, make_wrapper
from lightning_3d.trace.interception import reads_meta_only


class Values:
    """The values of a lazy tensor, made at most once, in the autograd and autocast state in which it came to be.

    Args:
        leaves: The tensors that they are computed from, each with its graph; None for those that are absent now.
        make: Makes them, given the name of the function that reads them.
        own: Makes this rank's part of them, of other tensors in the places of the leaves.
        cut: Makes this rank's part of their gradient.
    """

    def __init__(
        self,
        leaves: Sequence[Tensor | None],
        make: Callable[[str], Tensor],
        own: Callable[..., Tensor],
        cut: Callable[[Tensor], Tensor] = lambda gradient: gradient,
    ) -> None:
        self.leaves, self._make, self._own, self._cut = leaves, make, own, cut
        self._has_grad = torch.is_grad_enabled()
        self._device = next(leaf for leaf in leaves if leaf is not None).device.type
        self._autocast = torch.get_autocast_dtype(self._device), torch.is_autocast_enabled(self._device)
        self._made: Tensor | None = None

    @property
    def are_made(self) -> bool:
        """Whether somebody has read them."""
        return self._made is not None

    def made(self, reader: str) -> Tensor:
        """The values with their graph; reader: the name of the function that reads them."""
        if self._made is None:
            with self._as_then(has_grad=self._has_grad), unseen_by_checkpoints():
                self._made = self._make(reader)
        return self._made

    def gradients(self, leaves: Sequence[Tensor | None], gradient: Tensor) -> list[Tensor | None]:
        """The gradients of other tensors in the places of the leaves, given that of the values; no collective."""
        asked = [leaf for leaf in leaves if _needs_gradient(leaf)]
        with self._as_then(has_grad=True):
            own = self._own(*leaves)
        found = iter(torch.autograd.grad(own, asked, self._cut(gradient)))
        return [next(found) if _needs_gradient(leaf) else None for leaf in leaves]

    def _as_then(self, *, has_grad: bool) -> AbstractContextManager[Any]:
        dtype, is_enabled = self._autocast
        states = ExitStack()
        states.enter_context(torch.set_grad_enabled(has_grad))
        states.enter_context(torch.autocast(self._device, dtype=dtype, enabled=is_enabled))
        if has_saved_tensor_hooks():  # of a checkpoint, which is not to count what the block before it keeps
            states.enter_context(saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor))
        return states


class LazyTensor(Tensor):
    """A tensor that is not there yet; see [Note: lazy tensors]."""

    source: Values
    view_of_head: View | None
    """How it comes from a head's logits; None if it does not."""
    _node: Node | None

    @staticmethod
    def __new__(cls, values: Values, shape: torch.Size, dtype: torch.dtype, view: View | None) -> LazyTensor:
        (device,) = {leaf.device for leaf in values.leaves[:1] if leaf is not None}
        tensor: LazyTensor = make_wrapper(cls, shape, dtype=dtype, device=device)
        tensor.source, tensor.view_of_head, tensor._node = values, view, None
        return tensor

    def plain(self, reader: str) -> Tensor:
        """A plain tensor, with its graph; reader: the name of the function that reads it."""
        made = self.source.made(reader)
        return made if self.has_own_graph else _Read.apply(self, made)  # type: ignore[no-untyped-call]  # torch 2.13

    @property
    def has_own_graph(self) -> bool:
        """Whether it is no output of somebody's autograd function, whose backward its gradient has to go through."""
        with DisableTorchFunctionSubclass():
            return self.grad_fn is self._node

    @property
    def is_untouched(self) -> bool:
        """Whether nobody has read it, or another view of the same logits, so that they may differ now."""
        is_read = self.source.are_made if self.view_of_head is None else self.view_of_head.call.outcome.is_plain
        return not is_read and self.has_own_graph and not are_transforms_active()

    @classmethod
    @torch.compiler.disable  # type: ignore[untyped-decorator]  # compiled code that reads them leaves its graph for it
    def __torch_function__(cls, func: Function, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        first = args[0] if args else None
        if func is Tensor.__hash__:
            return id(first)
        if isinstance(first, cls) and first.is_untouched:
            if reads_meta_only(func) and func not in _NOT_ANSWERED:
                with DisableTorchFunctionSubclass():
                    return func(*args, **kwargs)
            if func is Tensor.register_hook and is_hook_of_fsdp(*args[1:]):  # waits for a gradient, not for its values
                return [leaf.register_hook(*args[1:]) for leaf in first.source.leaves if _needs_gradient(leaf)]
            if (
                first.view_of_head is not None
                and (view := first.view_of_head.after(func, args[1:], kwargs)) is not None
            ):
                return first._derived(view, func, args[1:], kwargs)
        if (call := _as_loss(func, args, kwargs)) is not None:
            return _fused(call)
        name = getattr(func, "__name__", str(func))
        if func in _ASK_FOR_GRADIENTS:
            _hook(name, args, kwargs)
        args, kwargs = tree_map(lambda leaf: made(leaf, name), (args, kwargs))
        return func(*args, **kwargs)

    def _derived(self, view: View, func: Function, args: Sequence[Any], kwargs: Any) -> LazyTensor:
        def own(logits: Tensor) -> Tensor:
            result: Tensor = func(logits, *args, **kwargs)
            return result

        return _of_logits(Values((self,), lambda reader: own(self.plain(reader)), own), view)

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


def lazy_logits(call: HeadCall) -> Tensor:
    """The output of a head as a tensor whose values come when they are read; see [Note: lazy tensors]."""
    if call.takes_others and not torch.is_grad_enabled():
        return call.logits(AT_CALL)
    return _of_logits(Values((call.rows, call.weight, call.bias), call.logits, call.own, call.cut), View.of(call))


def lazily_gathered(activation: ShardedTensor) -> Tensor:
    """An evenly sharded output that nothing is known to read as a tensor that whoever reads it gathers."""
    local, axis, placement = activation.own(), activation.axis, activation.placement

    def gather(reader: str) -> Tensor:
        return redistribute(local, axis, placement, REPLICATE)

    if not torch.is_grad_enabled():
        return gather(AT_CALL)
    values = Values((local,), gather, torch.clone, lambda gradient: placement.own(gradient, axis.size, axis.rank))
    return _lazily(values, activation.shape, activation.dtype, None)


def made(leaf: object, reader: str = AT_END) -> Any:
    """A lazy tensor as a plain one, for the function of that name; anything else as it is."""
    return leaf.plain(reader) if isinstance(leaf, LazyTensor) else leaf


def _of_logits(values: Values, view: View) -> LazyTensor:
    logits = _lazily(values, view.shape, view.dtype, view)
    reference = weakref.ref(logits)
    view.call.at_end.append(lambda: made(reference()))
    return logits


def _lazily(values: Values, shape: torch.Size, dtype: torch.dtype, view: View | None) -> LazyTensor:
    tensor = cast(LazyTensor, _Enter.apply(values, shape, dtype, view, *values.leaves))  # type: ignore[no-untyped-call]
    with DisableTorchFunctionSubclass():
        tensor._node = tensor.grad_fn
    return tensor


class _Enter(torch.autograd.Function):
    """The graph of a lazy tensor for code that computes with it unseen."""

    @staticmethod
    def forward(
        ctx: Any, values: Values, shape: torch.Size, dtype: torch.dtype, view: View | None, *leaves: Tensor | None
    ) -> Tensor:
        ctx.values = values
        ctx.save_for_backward(*leaves)
        return LazyTensor(values, shape, dtype, view)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_order("an output of a block that a custom autograd function reads")
        leaves = [_leaf(tensor) for tensor in ctx.saved_tensors]
        return None, None, None, None, *ctx.values.gradients(leaves, made(gradient))


class _Read(torch.autograd.Function):
    """A lazy tensor, values -> the values, with the graph of the former."""

    @staticmethod
    def forward(ctx: object, tensor: LazyTensor, values: Tensor) -> Tensor:
        return values.detach()

    @staticmethod
    def backward(ctx: object, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


def _leaf(tensor: Any) -> Any:
    return None if tensor is None else tensor.detach().requires_grad_(tensor.requires_grad)


def _needs_gradient(leaf: Tensor | None) -> TypeGuard[Tensor]:
    return leaf is not None and leaf.requires_grad


# ------------------------------------------------------------------------------------------------------- the loss


def _as_loss(func: Function, args: Any, kwargs: Any) -> CrossEntropy | None:
    """Read a call as the cross entropy of lazy logits that can be computed without them."""
    call = as_cross_entropy(func, args, kwargs)  # of logarithms of probabilities it is the same
    call = as_cross_entropy(func, args, kwargs, of=F.nll_loss) if call is None else call
    if call is None or not isinstance(call.input, LazyTensor) or not call.input.is_untouched:
        return None
    view = call.input.view_of_head
    if view is None or (func is F.nll_loss and not view.is_log) or isinstance(call.target, LazyTensor):
        return None
    is_whole = view.class_dim == call.class_dim
    has_loss = view.rows.numel() > 0 or call.reduction != "mean"
    return call if is_whole and has_loss and call.target.device == view.rows.device else None


def _fused(call: CrossEntropy) -> Tensor:
    view = cast(View, cast(LazyTensor, call.input).view_of_head)
    view.call.is_fused = True
    epilogue, dtype, classes = view.epilogue, view.call.dtype, view.call.classes
    while epilogue and epilogue[-1] == Cast(torch.promote_types(dtype, torch.float32)):  # as the loss does by itself
        epilogue = epilogue[:-1]

    def compute(inputs: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        return cross_entropy_of(
            inputs, Head(weight=weight, bias=bias, dtype=dtype, epilogue=epilogue, classes=classes), call
        )

    with unseen_by_checkpoints():
        loss = view.call.run(view.inputs(), compute)
    is_autocast = torch.is_autocast_enabled(loss.device.type)
    loss = loss.to(loss.dtype if is_autocast else view.dtype)
    return loss.reshape(call.target.shape if loss.dim() else ())


_ASK_FOR_GRADIENTS = frozenset({Tensor.register_hook, Tensor.retain_grad, torch.autograd.grad, torch.autograd.backward})


def _hook(name: str, args: object, kwargs: object) -> None:
    """Note that the gradient of logits is asked for; refuse it where it is too late."""
    leaves = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, LazyTensor)]
    calls = [leaf.view_of_head.call for leaf in leaves if leaf.view_of_head is not None]
    if any(call.is_fused for call in calls):
        raise StepError(
            f"{name} asks for the gradient of logits after their cross entropy was computed, fused with the head, which"
            " makes no such gradient. Call it before the loss, or set activations.fused_loss='never'."
        )
    for call in calls:
        call.outcome.is_plain = True


_NOT_ANSWERED = frozenset({Tensor.register_hook, Tensor.__repr__})
"""Exceptions from the functions that ask for shape, dtype and the like."""
