"""Cross entropy on logits whose classes are sharded over the tp axis (Megatron-LM, Shoeybi et al. 2019), or whole.

No rank holds all logits: two all-reduces, of a maximum and of three sums per row, take the place of gathering them.
Without an axis there is nothing to reduce. What the numbers mean is what ``F.cross_entropy`` documents. This is the
arithmetic alone; autograd is in `chunked_loss`.

    loss of a row = -(1 - s) w[t] log p[t]  -  s / C  sum over c of w[c] log p[c]        s: label smoothing, w: weights
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from lightning_3d.sharding.rules.function import Function
from lightning_3d.tensor.vocabulary.sharded_classes import shard_bounds

Reduction = Literal["mean", "sum", "none"]


@dataclass(frozen=True, slots=True)
class CrossEntropy:
    """The arguments of ``F.cross_entropy``, by the same names."""

    input: Tensor
    """``[classes]`` or ``[rows, classes, ...]``."""

    target: Tensor
    """Has the input's shape without the classes; int64."""

    weight: Tensor | None = None
    """``[classes]``; a constant."""

    size_average: bool | None = None
    ignore_index: int = -100
    reduce: bool | None = None
    reduction: Reduction = "mean"
    label_smoothing: float = 0.0

    @property
    def class_dim(self) -> int:
        """The input's dim of the classes."""
        return min(1, self.input.dim() - 1)

    @property
    def has_sharded_form(self) -> bool:
        """Whether the options are none of those deprecated, and the targets are class indices."""
        shape = list(self.input.shape)
        num_classes, weight = shape.pop(self.class_dim), self.weight
        return (
            self.size_average is None
            and self.reduce is None
            and self.reduction in ("mean", "sum", "none")
            and 0.0 <= self.label_smoothing <= 1.0
            and self.target.dtype == torch.int64
            and list(self.target.shape) == shape
            and (weight is None or (not weight.requires_grad and list(weight.shape) == [num_classes]))
        )


def as_cross_entropy(
    function: Function, args: tuple[Any, ...], kwargs: dict[str, Any], *, of: Function = F.cross_entropy
) -> CrossEntropy | None:
    """Read a call as a cross entropy that can run on shards, or None; ``F.nll_loss`` as that of what its logarithms of
    probabilities were made of.
    """
    if function is not of:
        return None
    call = CrossEntropy(*args, **kwargs)  # has the arguments of ``F.nll_loss``, and one more
    return call if call.has_sharded_form else None


@dataclass(frozen=True, kw_only=True, slots=True)
class Saved:
    """Tensors that the backward needs."""

    softmax: Tensor
    """``[rows, own classes]``, fp32 or wider."""

    column: Tensor
    """``[rows, 1]``: the target's column of the own classes; 0 where another rank has it."""

    target_gradient: Tensor
    """``[rows]``: what the gradient of the target's own logit has besides the softmax's; 0 on other ranks."""

    softmax_gradient: Tensor
    """``[rows]``: factor of the softmax in the gradient."""

    smooth_gradient: Tensor | None
    """``[rows, own classes]`` or broadcastable to it: what label smoothing takes off the gradient."""


def forward(call: CrossEntropy, logits: Tensor, num_classes: int, mesh: DeviceMesh | None) -> tuple[Tensor, Saved]:
    """Compute the losses of rows.

    Args:
        call: The call; of its input and its reduction nothing is read.
        logits: This rank's classes, ``[rows, own classes]``.
        num_classes: The number over all ranks.
        mesh: The tp axis; None if all classes are here.

    Returns:
        The losses, ``[rows]``, equal on all ranks, and what the backward needs.
    """
    start, stop = (0, num_classes) if mesh is None else shard_bounds(num_classes, mesh)
    target, smoothing = call.target.reshape(-1), call.label_smoothing
    shifted = logits.to(torch.promote_types(logits.dtype, torch.float32))
    greatest = shifted.amax(-1)
    if mesh is not None:
        dist.all_reduce(greatest, dist.ReduceOp.MAX, group=mesh.get_group())
    shifted = shifted - greatest.unsqueeze(-1)
    counted = target != call.ignore_index
    is_own = counted & (target >= start) & (target < stop)
    is_invalid = counted & ((target < 0) | (target >= num_classes))
    # An invalid target is out of bounds in `gather` on every rank, as it is in one process.
    column = torch.where(is_own, target - start, torch.where(is_invalid, stop - start, 0)).unsqueeze(-1)
    at_target = torch.where(is_own, shifted.gather(-1, column).squeeze(-1), 0.0)
    weight = None if call.weight is None else call.weight.to(shifted.dtype)
    own_weight = None if weight is None else weight[start:stop]
    sums = [at_target]
    if smoothing:
        sums.append((shifted if own_weight is None else shifted * own_weight).sum(-1))
    exponentials = shifted.exp_()
    summed = torch.stack([exponentials.sum(-1), *sums])
    if mesh is not None:
        dist.all_reduce(summed, group=mesh.get_group())
    log_sum = summed[0].log()

    row_weight = counted.to(shifted.dtype)
    if weight is not None:
        row_weight = torch.where(counted, weight[torch.where(counted, target, 0)], 0.0)
    target_factor = (1.0 - smoothing) * row_weight
    softmax_factor, losses = target_factor, target_factor * (log_sum - summed[1])
    smooth_gradient = None
    if smoothing:
        per_class = smoothing / num_classes
        total_weight = num_classes if weight is None else weight.sum()
        losses = losses + per_class * (total_weight * log_sum - summed[2])
        softmax_factor = target_factor + per_class * total_weight
        smooth_gradient = torch.where(counted, per_class, 0.0).unsqueeze(-1)
        smooth_gradient = smooth_gradient if own_weight is None else smooth_gradient * own_weight
    saved = Saved(
        softmax=exponentials.div_(summed[0].unsqueeze(-1)),
        column=column,
        target_gradient=torch.where(is_own, target_factor, 0.0),
        softmax_gradient=torch.where(counted, softmax_factor, 0.0),
        smooth_gradient=smooth_gradient,
    )
    return torch.where(counted, losses, 0.0), saved  # also where an ignored row is not finite


def backward(saved: Saved, gradient: Tensor) -> Tensor:
    """The gradient of this rank's logits, ``[rows, own classes]``.

    Args:
        saved: From the forward.
        gradient: The gradient of the losses, ``[rows]``, or 0-d where it is the same of all.
    """
    logits_gradient = saved.softmax * saved.softmax_gradient.unsqueeze(-1)
    logits_gradient.scatter_add_(-1, saved.column, -saved.target_gradient.unsqueeze(-1))
    if saved.smooth_gradient is not None:
        logits_gradient -= saved.smooth_gradient
    return logits_gradient.mul_(gradient.to(logits_gradient.dtype).reshape(-1, 1))
