"""Finds what the loss is divided by, such as the count of valid labels, in the code after the blocks.

    sums of the weights of valid labels    in a mean of ``cross_entropy`` or ``nll_loss``
    scalars                                that something is divided by

Shares of microbatches in one of them may be the weights of their losses (``loss_study.py``).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext

import torch
import torch.nn.functional as F
from torch import Tensor
from typing_extensions import override

from lightning_3d.model.block_runner import AnyCallable
from lightning_3d.pipeline.stage_run import StageRun
from lightning_3d.planning.stage_flow import StageFlow
from lightning_3d.sharding.rules.losses import weights_of_labels
from lightning_3d.trace.ghost import Ghost
from lightning_3d.trace.interception import Router
from lightning_3d.trace.trace import TracedCall

LOSS_CODE = 1
"""The stage of the code after the blocks, where all blocks are on one before it."""

_DIVIDING = frozenset({"div", "divide", "idiv", "itruediv", "true_divide", "truediv"})


class GhostTail(StageRun):
    """Runs the code after the blocks up to where it reads what they gave, of which it computes nothing: what comes of
    it has a shape, and no data. Notes by what it divides.
    """

    has_replicas = False

    def __init__(self, router: Router, flow: StageFlow) -> None:
        received = [Ghost(meta) for meta in flow.metas(flow.received(LOSS_CODE))]
        super().__init__(router, flow, LOSS_CODE, received, lambda call: nullcontext())
        self.denominators: list[Tensor] = []
        """0-d tensors of float64."""

    @override
    def _execute(self, call: TracedCall, leaves: list[object], run: Callable[[list[object]], object]) -> object:
        return self._skip(call, leaves)

    @override
    def on_function(self, func: AnyCallable, args: tuple[object, ...], kwargs: dict[str, object]) -> object:
        position = self._position
        answer = super().on_function(func, args, kwargs)
        if self._position > position and self._flow.call_stages[position] == LOSS_CODE:
            tensors = [leaf for leaf in args if isinstance(leaf, Tensor) and leaf not in self._ids]
            with torch.no_grad():
                self.denominators += _scalars(func, tensors) + _weights_of_labels(func, args, kwargs)
        return answer


def _scalars(func: AnyCallable, tensors: Sequence[Tensor]) -> list[Tensor]:
    """By what scalars of the batch this function divides."""
    if getattr(func, "__name__", "").strip("_") not in _DIVIDING:
        return []
    scalars = [tensor for tensor in tensors if tensor.ndim == 0 and not (tensor.requires_grad or tensor.is_meta)]
    return [scalar.to(torch.float64, copy=True) for scalar in scalars if not scalar.is_complex()]


def _weights_of_labels(func: AnyCallable, args: Sequence[object], kwargs: Mapping[str, object]) -> list[Tensor]:
    """The sum of the weights of valid labels, of a mean over them."""
    if func not in (F.cross_entropy, F.nll_loss):
        return []
    given = inspect.signature(func).bind(*args, **kwargs)
    given.apply_defaults()
    labels, weight = given.arguments["target"], given.arguments["weight"]
    if given.arguments["reduction"] != "mean" or isinstance(labels, Ghost) or labels.is_floating_point():
        return []
    return [weights_of_labels(labels, weight, given.arguments["ignore_index"]).double()]


def read(denominators: Sequence[Sequence[Tensor]]) -> Tensor:
    """The numbers by which several runs divide, (runs, numbers), which the host reads from the device at once; none
    where some runs divide by more of them than others.
    """
    if not denominators[0] or len({len(own) for own in denominators}) > 1:
        return torch.zeros(len(denominators), 0)
    device = denominators[0][0].device
    return torch.stack([torch.stack([number.to(device) for number in own]) for own in denominators]).cpu()
