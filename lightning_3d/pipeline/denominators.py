"""Seeing by what data of the batch the loss of a step may be divided, in the code after the blocks.

    sums of the weights of valid labels    in a mean of ``cross_entropy`` or ``nll_loss``
    scalars                                that something is divided by, or multiplied with
    numbers of elements                    in a mean over a selection, whose shape depends on data

Shares of microbatches in one of them may be the weights of their losses (``loss_study.py``).
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from typing_extensions import override

from lightning_3d.model.block_runner import Call
from lightning_3d.pipeline.stage_run import Draw, StageRun, plain_call
from lightning_3d.planning.stage_flow import StageFlow
from lightning_3d.torch_internals.pytree import tree_leaves, tree_map_only
from lightning_3d.trace.ghost import Ghost, TensorMeta
from lightning_3d.trace.interception import Router
from lightning_3d.trace.trace import Trace, TracedCall

TAIL = 1
"""The stage of the code after the blocks, where all blocks are on one before it."""

_TIMES = frozenset({"mul", "multiply"})
_DIVIDED = frozenset({"div", "truediv", "true_divide", "divide"})
_KINKED = frozenset(
    {"abs", "clamp", "clamp_max", "clamp_min", "clip", "hardtanh", "leaky_relu", "max", "maximum", "min", "minimum"}
    | {"relu", "threshold", "where"}
)
_MEANS = frozenset({torch.mean, Tensor.mean})
_MEAN_LOSSES = frozenset(
    {
        F.binary_cross_entropy,
        F.binary_cross_entropy_with_logits,
        F.huber_loss,
        F.l1_loss,
        F.mse_loss,
        F.smooth_l1_loss,
    }
)


class _NotedTail(StageRun):
    """Runs the code after the blocks, and notes by what it divides.

    Args:
        received: The tensors of blocks that it gets.
        draw: Makes the calls that get none.
    """

    has_replicas = False

    def __init__(self, router: Router, flow: StageFlow, received: Sequence[Tensor], draw: Draw) -> None:
        super().__init__(router, flow, TAIL, received, lambda call: nullcontext(), draw)
        self.denominators: list[float | Tensor] = []
        """Numbers, and 0-d tensors of float64 that are yet to be read."""

    @override
    def on_function(self, func: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        position, is_past_trace = self._position, self._is_past_trace
        answer = super().on_function(func, args, kwargs)
        if is_past_trace or (self._position > position and self._flow.call_stages[position] == TAIL):
            self._note(func, args, kwargs, is_past_trace=is_past_trace)
        return answer

    @property
    def _is_past_trace(self) -> bool:
        """Whether a shape has depended on data, which no trace can follow."""
        return self._expected is None and self._flow.trace.stopped_by is not None

    @torch.no_grad()
    def _note(self, func: Call, args: Sequence[Any], kwargs: Mapping[str, Any], *, is_past_trace: bool) -> None:
        tensors = [leaf for leaf in args if isinstance(leaf, Tensor) and leaf not in self._ids]
        self.denominators += _scalars(func, tensors) + _weights_of_labels(func, args, kwargs)
        if is_past_trace:
            self.denominators += _sizes_of_means(func, args, kwargs)


class WatchedTail(_NotedTail):
    """Computes all, to be compared for microbatches and the whole batch.

    Terms with a factor of zero, which may be a weight that is still to rise, count in full. In place of numbers that it
    draws for what blocks gave (dropout), it gets its own input, which is alike for microbatches and the whole batch.
    """

    def __init__(self, router: Router, flow: StageFlow, received: Sequence[Tensor], draw: Draw) -> None:
        super().__init__(router, flow, received, draw)
        self.has_kink = False
        """Whether a number that comes of blocks is bent at some value, as by ``loss.clamp(max=1)``: random outputs need
        not show it.
        """

    @override
    def on_function(self, func: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if _is_named(func, _TIMES) and any(isinstance(leaf, Tensor) and leaf in self._ids for leaf in args):
            args = tuple(1.0 if type(leaf) in (int, float) and leaf == 0 else leaf for leaf in args)
        if getattr(func, "__name__", "").strip("_") in _KINKED:
            numbers = [leaf for leaf in args if isinstance(leaf, Tensor) and leaf.ndim == 0 and leaf in self._ids]
            self.has_kink |= any(number.requires_grad for number in numbers)
        return super().on_function(func, args, kwargs)

    @override
    def _execute(self, call: TracedCall, leaves: list[Any], run: Callable[[list[Any]], Any]) -> Any:
        if not call.is_random or not is_like_input(call, self._flow.trace):
            return super()._execute(call, leaves, run)
        return super()._execute(call, leaves, partial(self._input_of, call))

    def _input_of(self, call: TracedCall, values: list[Any]) -> Tensor:
        """The argument that has the shape and dtype of a call's result."""
        (output,) = call.outputs
        meta = self._flow.trace.tensors[output]
        tensors = [value for value in values if isinstance(value, Tensor)]
        return next(tensor for tensor in tensors if (tensor.shape, tensor.dtype) == (meta.shape, meta.dtype))


class GhostTail(_NotedTail):
    """Computes nothing of what blocks gave: what comes of it has a shape, and no data."""

    def __init__(self, router: Router, flow: StageFlow) -> None:
        super().__init__(router, flow, [Ghost(meta) for meta in flow.metas(flow.received(TAIL))], plain_call)

    @override
    def _execute(self, call: TracedCall, leaves: list[Any], run: Callable[[list[Any]], Any]) -> Any:
        return self._skip(call, leaves)

    @override
    def on_function(self, func: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not self._is_past_trace:
            return super().on_function(func, args, kwargs)
        answer = _answer(func, args, kwargs)
        self._note(func, args, kwargs, is_past_trace=True)
        return answer


def is_like_input(call: TracedCall, trace: Trace) -> bool:
    """Whether a call returns one tensor, of the shape and dtype of one that it consumes."""
    metas = [(trace.tensors[i].shape, trace.tensors[i].dtype) for i in (*call.outputs, *call.inputs)]
    return len(call.results) == len(call.outputs) == 1 and metas[0] in metas[1:]


def _answer(func: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call it, on the meta device if an argument has no data; masks have."""
    if not any(_is_empty(leaf) for leaf in tree_leaves((args, kwargs))):
        return func(*args, **kwargs)
    if func is Tensor.__getitem__:
        args = args[0], _without_masks(args[1])
    elif func in (torch.masked_select, Tensor.masked_select):
        func, args = Tensor.__getitem__, (args[0], _without_masks(args[1]))
    args, kwargs = tree_map_only(Tensor, _on_meta, (args, kwargs))
    return func(*args, **kwargs)


def _on_meta(tensor: Tensor) -> Tensor:
    return tensor if tensor.is_meta else TensorMeta.of(tensor).on_meta()


def _is_empty(leaf: Any) -> bool:
    """Whether it is a tensor without data."""
    return isinstance(leaf, Tensor) and (isinstance(leaf, Ghost) or leaf.is_meta)


def _without_masks(index: Any) -> tuple[Any, ...]:
    """The same index with positions in place of masks, whose data shapes depend on."""
    entries: list[Any] = []
    for entry in index if isinstance(index, tuple) else (index,):
        is_mask = isinstance(entry, Tensor) and entry.dtype == torch.bool
        entries += entry.nonzero(as_tuple=True) if is_mask else [entry]
    return tuple(entries)


def _is_named(func: Call, names: frozenset[str]) -> bool:
    """Whether it has one of these names, also in place or reflected."""
    return getattr(func, "__name__", "").strip("_").removeprefix("i").removeprefix("r") in names


def _scalars(func: Call, tensors: Sequence[Tensor]) -> list[float | Tensor]:
    """By what scalars this function divides, where it divides or multiplies; nan where there is no data."""
    is_product = _is_named(func, _TIMES)
    if not is_product and not _is_named(func, _DIVIDED):
        return []
    found: list[float | Tensor] = []
    for scalar in tensors:
        if scalar.ndim == 0 and not scalar.requires_grad and not scalar.is_complex():
            number = math.nan if _is_empty(scalar) else scalar.to(torch.float64, copy=True)
            if is_product and isinstance(number, Tensor):
                number = torch.where(number == 0, 0.0, 1 / number)
            found.append(number)
    return found


def _weights_of_labels(func: Call, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[float | Tensor]:
    """The sum of the weights of valid labels, of a mean over them."""
    if func not in (F.cross_entropy, F.nll_loss):
        return []
    given = inspect.signature(func).bind(*args, **kwargs)
    given.apply_defaults()
    labels, weight = given.arguments["target"], given.arguments["weight"]
    if given.arguments["reduction"] != "mean" or _is_empty(labels) or labels.is_floating_point():
        return []
    is_valid = labels != given.arguments["ignore_index"]
    counted = is_valid if weight is None else weight[torch.where(is_valid, labels, 0)] * is_valid
    return [counted.sum(dtype=torch.float64)]


def read(denominators: Sequence[Sequence[float | Tensor]]) -> list[list[float]]:
    """The numbers by which several runs divide, which the host reads from the device at once."""
    tensors = [number for own in denominators for number in own if isinstance(number, Tensor)]
    numbers = iter(torch.stack([number.to(tensors[0].device) for number in tensors]).tolist() if tensors else [])
    return [[next(numbers) if isinstance(number, Tensor) else number for number in own] for own in denominators]


def _sizes_of_means(func: Call, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[float | Tensor]:
    """The number of elements of a mean over all of them."""
    is_mean = func in _MEANS and len(args) == 1 and not kwargs
    is_mean |= func in _MEAN_LOSSES and kwargs.get("reduction", "mean") == "mean"
    return [float(args[0].numel())] if is_mean and args else []
