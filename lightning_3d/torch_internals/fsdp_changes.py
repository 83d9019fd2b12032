"""FSDP2: arguments of units that their forwards change in place. torch 2.13.

FSDP2 hands a forward views of the arguments that have gradients, by an autograd function whose backward frees and
reduces the unit once all of its gradients are there. Autograd refuses changes of such views. Here they are views like
others; and as the gradients of one that was changed pass that function by, and may come without any of the outputs:

    caller's tensor now      its gradient gathers the unit
            |
    what the forward did
            |
    caller's tensor before   its gradient comes after those of the unit, which are reduced then
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch._C._autograd import CreationMeta, _get_creation_meta, _set_creation_meta
from torch.autograd.graph import Node
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.fsdp._common_utils import collect_grad_tensors, replace_grad_tensors
from torch.distributed.fsdp._fully_shard._fsdp_param_group import RegisterPostBackwardFunction
from torch.distributed.utils import _apply_to_tensors

from lightning_3d.torch_internals.fsdp import groups_of
from lightning_3d.torch_internals.tensors import are_transforms_active, base_of, is_view


class ChangeableArguments:
    """Lets the forward of a unit change its arguments in place.

    Args:
        changed: Called with each tensor that a forward changed, after it, if its gradient is to come.
    """

    def __init__(self, unit: FSDPModule, changed: Callable[[Tensor], None]) -> None:
        self._state: Any = fully_shard.state(unit)  # type: ignore[attr-defined]
        self._changed = changed
        self._given: list[_Given] = []
        self._register_outputs = self._state._register_pre_backward_hook
        self._state._register_pre_backward_hook = self._leave
        for group in groups_of(unit):
            group._register_post_backward_hook = _Entering(group, self._given)

    def _leave(self, output: Any) -> Any:
        """In place of the hook that has the unit gathered when the gradient of an output comes."""
        given = [*self._given]
        self._given.clear()
        if not torch.is_grad_enabled() or are_transforms_active():
            return self._register_outputs(output)
        changed = [argument for argument in given if argument.is_changed()]
        for argument in changed:
            argument.reduce_late()
            self._gather_for(argument.root)
            self._changed(argument.root)
        if changed:
            own = {id(argument.view): argument.tensor for argument in changed}
            output = _apply_to_tensors(lambda leaf: own.get(id(leaf), leaf), output)
        unchanged = {id(argument.root) for argument in given} - {id(argument.root) for argument in changed}
        for leaf in collect_grad_tensors(output):
            self._gather_for(leaf)
            base = base_of(leaf)  # which has the hook still when the view is changed in place
            if base is not None and base.grad_fn is not None and id(base) not in unchanged:
                self._gather_for(base)
        return output

    def _gather_for(self, tensor: Tensor) -> None:
        """Have the unit gathered when the gradient of a tensor comes."""
        if tensor.grad_fn is not None:  # read first: of a view whose base was changed, torch has none yet, and crashes
            tensor.register_hook(self._state._pre_backward)


class _Given:
    """An argument that has a gradient, and the view of it that the forward gets."""

    def __init__(self, tensor: Tensor, view: Tensor, end: _End) -> None:
        base = base_of(tensor)
        self.tensor, self.view, self._end = tensor, view, end
        self.root = tensor if base is None else base
        """The tensor that has the history of all its views."""
        self._before: Node | None = self.root.grad_fn

    def is_changed(self) -> bool:
        """Whether it has another history than before the forward."""
        return self.root.grad_fn is not self._before

    def reduce_late(self) -> None:
        self._end.is_late = True
        if self._before is not None:
            self._before.register_prehook(self._end.reduce)


class _End:
    """The end of the backward of one call, at which the gradients of a group of parameters are reduced."""

    def __init__(self, group: Any) -> None:
        self._group = group
        self.is_late = False
        """Whether it is not where FSDP2's autograd function says."""

    def post_backward(self) -> None:
        """Called by that function."""
        if not self.is_late:
            self._group.post_backward()

    def reduce(self, _: object) -> None:
        self._group.post_backward()


class _Entering:
    """In place of the method of a group that applies FSDP2's autograd function to the arguments of a forward."""

    def __init__(self, group: Any, given: list[_Given]) -> None:
        self._group, self._given = group, given

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if not torch.is_grad_enabled() or not (tensors := collect_grad_tensors((args, kwargs))):
            return args, kwargs
        end = _End(self._group)
        outputs: Iterable[Tensor] = RegisterPostBackwardFunction.apply(end, *tensors)
        if not are_transforms_active():
            views = [_changeable(*pair) for pair in zip(tensors, outputs, strict=True)]
            self._given += [_Given(*pair, end) for pair in zip(tensors, views, strict=True)]
            outputs = views
        given: tuple[tuple[Any, ...], dict[str, Any]] = replace_grad_tensors((args, kwargs), iter(outputs))
        return given


def _changeable(tensor: Tensor, output: Tensor) -> Tensor:
    """A view that may be changed in place if the tensor may, for the function's output."""
    is_output = is_view(tensor) and _get_creation_meta(tensor) != CreationMeta.DEFAULT
    if is_output or tensor.layout is not torch.strided or tensor.is_nested:
        return output
    view = output.view_as(output)  # the only output of its node
    _set_creation_meta(view, CreationMeta.DEFAULT)
    return view
