"""Gradients multiplied on their way back: of a weight that each rank meets with a slice, and counts as its replica."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn


def with_gradient_times(tensor: Tensor, factor: float) -> Tensor:
    """The same tensor, whose gradient is multiplied on its way back."""
    return cast(Tensor, _WithGradientTimes.apply(tensor, factor))  # type: ignore[no-untyped-call]


class _WithGradientTimes(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        # `data`, as user code may change a result in place, which autograd refuses for a view made here.
        return tensor.view_as(tensor) if isinstance(tensor, nn.Parameter) else tensor.data

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient * ctx.factor, None
