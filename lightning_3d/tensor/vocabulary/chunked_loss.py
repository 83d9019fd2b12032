"""Cross entropy of a head's outputs that never exist in full: rows in chunks, logits -> loss and gradients.

[Note: loss without logits]
The loss of a row needs no other row's logits. So a chunk of rows at a time makes its logits, its part of the loss and
the gradient of these logits, which at once becomes that of the rows and a part of that of the weight. The forward does
all of it, as the gradient is linear in that of the loss, a factor that the backward supplies (Hsu et al. 2024, Liger):

    rows [N, D] -> for each chunk: logits [n, V] -> losses [n], d logits [n, V] -> d rows [n, D], d weight [V, D] += ...

With classes that are sharded over the tp axis, each rank does so with its own. A chunk takes two all-reduces (`loss`);
d rows are then parts of a sum over the ranks, which is made once, where the rows come in. Where a block has multiplied
with the weight already, the rows are the logits of own classes.

Where the factor is not one number (``reduction="none"``), or where gradients without it are too small for the numbers
(fp16, which a loss scale serves), the backward makes the logits again, chunk by chunk (Wijmans et al. 2024).

``torch.nn.functional.linear_cross_entropy`` (torch 2.13) works alike, but has no label smoothing, no elementwise
functions between head and loss, no product in another dtype than the weight's, and drops its gradients in the first
backward; a schedule that splits the backward asks for them twice. Gradients of rows and of weights come from two nodes
of the graph here, so that such schedules find each where they look for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_3d.errors import PlanError
from lightning_3d.tensor.vocabulary import loss as vocabulary_loss
from lightning_3d.tensor.vocabulary.loss import CrossEntropy
from lightning_3d.tensor.vocabulary.sharded_classes import ShardedClasses
from lightning_3d.torch_internals.dispatch import DisableTorchFunctionSubclass

MOST_CHUNKS = 32
"""More of them would save little memory, and make the products of matrices too thin."""
LEAST_LOGITS = 2**22
"""Logits that a chunk has at least, if there are so many."""
LEAST_LOGITS_OF_GPU = 2**26
"""The same on devices that are fast at large products: 256 MiB in fp32. Each chunk reads and writes the gradient of the
weight, so that one of few rows waits for memory."""

Elementwise = Callable[[Tensor], Tensor]


@dataclass(frozen=True, kw_only=True, slots=True)
class Head:
    """How logits are made of rows and read by a loss."""

    weight: Tensor | None
    """``[classes, width]``, of this rank's classes; None where the rows are logits."""
    bias: Tensor | None
    dtype: torch.dtype
    """In which they are multiplied: that of autocast, or their own."""
    epilogue: tuple[Elementwise, ...] = ()
    """Functions of single logits that come before the loss."""
    classes: ShardedClasses | None = None
    """All classes, where a rank has a part of them."""

    @property
    def most_classes(self) -> int:
        """The number of classes on the rank that has most."""
        if self.classes is not None:
            return self.classes.most
        assert self.weight is not None
        return len(self.weight)

    def cast(self) -> Head:
        """The same with weights in the dtype of the product."""
        weight, bias = (None if tensor is None else tensor.to(self.dtype) for tensor in (self.weight, self.bias))
        return replace(self, weight=weight, bias=bias)

    def logits(self, rows: Tensor) -> Tensor:
        """The logits of some rows for the classes here, without what happens to them."""
        if self.weight is None:
            return rows
        with torch.autocast(rows.device.type, enabled=False), DisableTorchFunctionSubclass():
            return F.linear(rows, self.weight, self.bias)

    def after(self, logits: Tensor) -> Tensor:
        """The logits as the loss reads them."""
        for function in self.epilogue:
            logits = function(logits)
        return logits


def cross_entropy_of(rows: Tensor, head: Head, call: CrossEntropy) -> Tensor:
    """The cross entropy of the logits that a head makes of rows.

    Args:
        rows: ``[N, width]``. Where classes are sharded, every rank gets its part of their gradient.
        head: Makes their logits.
        call: Its options, and targets of N rows; its input is not read. It has a sharded form.

    Returns:
        0-d, or ``[N]`` with ``reduction="none"``; fp32 or wider.
    """
    call = replace(call, input=rows.new_empty(0), target=call.target.reshape(-1))
    gradients = _Gradients(head, call)
    shape = (len(rows),) if call.reduction == "none" else ()
    seed = _Weights.apply(head.weight, head.bias, rows.detach(), gradients, shape)  # type: ignore[no-untyped-call]
    return cast(Tensor, _Loss.apply(rows, seed, gradients))  # type: ignore[no-untyped-call]  # torch 2.13


@dataclass(slots=True)
class _Made:
    """Gradients for a factor of the loss's gradient."""

    rows: Tensor | None = None
    weight: Tensor | None = None
    bias: Tensor | None = None


class _Gradients:
    """Loss and gradients of one call, which the two nodes of its graph share; it holds no rows, which nodes release."""

    def __init__(self, head: Head, call: CrossEntropy) -> None:
        self.wide, self.call = torch.promote_types(head.dtype, torch.float32), call
        self.weight, self.bias = head.weight, head.bias  # the nodes of the graph
        weight, bias = (None if tensor is None else tensor.detach() for tensor in (head.weight, head.bias))
        self.head = replace(head, weight=weight, bias=bias)
        self.made: _Made | None = None  # of the weights, for a factor of 1; until a backward takes them
        self.has_backward = torch.is_grad_enabled()
        is_by_row = call.reduction == "none" and weight is not None  # whose gradient takes the factors of all rows
        self.comes_late = is_by_row or head.dtype == torch.float16
        self.normaliser = _normaliser(call).to(self.wide) if call.reduction == "mean" else None

    def run(
        self,
        rows: Tensor,
        factor: Tensor | None,
        *,
        of_rows: bool = False,
        of_weight: bool = False,
        of_bias: bool = False,
    ) -> tuple[Tensor, _Made]:
        """The losses, and the gradients asked for.

        Args:
            rows: Without a gradient.
            factor: The gradient of the loss, 0-d or ``[N]``; None for 1.
        """
        made, losses = _Made(), []
        head = self.head.cast()
        if of_rows:
            made.rows = torch.empty_like(rows)
        if of_weight:
            assert head.weight is not None
            made.weight = torch.zeros_like(head.weight, dtype=self.wide)
        if of_bias:
            assert head.bias is not None
            made.bias = torch.zeros_like(head.bias, dtype=self.wide)
        scale = self._scale(factor, rows.device)
        for part in chunks(len(rows), head.most_classes, rows.device.type):
            own = rows[part].to(head.dtype)
            call = replace(self.call, target=self.call.target[part])
            of_logits = (scale[part] if scale.dim() else scale) if of_rows or of_weight or of_bias else None
            loss, gradient = _chunk(own, head, call, of_logits)
            losses.append(loss)
            if gradient is not None:
                self._add(made, part, gradient, own, head.weight)
        losses = losses or [rows.new_empty(0, dtype=self.wide)]
        if self.call.reduction == "none":
            return torch.cat(losses), made
        total = torch.stack([loss.sum() for loss in losses]).sum()
        return total if self.normaliser is None else total / self.normaliser, made

    def _add(self, made: _Made, part: slice, gradient: Tensor, rows: Tensor, weight: Tensor | None) -> None:
        """Add what a part of the rows gives, in the head's dtype also where the loss is in a region of autocast."""
        with torch.autocast(rows.device.type, enabled=False):
            if made.rows is not None:
                made.rows[part] = gradient if weight is None else gradient @ weight
            if made.bias is not None:
                made.bias += gradient.sum(0, dtype=self.wide)
            if made.weight is not None and self.wide == rows.dtype:
                made.weight.addmm_(gradient.t(), rows)
            elif made.weight is not None and made.weight.device.type == "cuda":  # alone adds to a wider dtype
                torch.addmm(made.weight, gradient.t(), rows, out_dtype=self.wide, out=made.weight)
            elif made.weight is not None:
                made.weight += gradient.t() @ rows

    def _scale(self, factor: Tensor | None, device: torch.device) -> Tensor:
        """The gradient of the losses of rows, 0-d or ``[N]``."""
        scale = torch.ones((), dtype=self.wide, device=device) if factor is None else factor.to(self.wide)
        if self.normaliser is None:
            return scale
        counted = self.call.target != self.call.ignore_index  # rows that count without any weight have a NaN each
        return torch.where(self.normaliser == 0, torch.where(counted, torch.nan, 0.0), scale / self.normaliser)


def _chunk(rows: Tensor, head: Head, call: CrossEntropy, of_loss: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """The losses of a chunk's rows, and the gradient of its logits before what happens to them, given the losses'."""
    logits = head.logits(rows)
    read = logits
    if head.epilogue:
        with torch.enable_grad():
            read = head.after(logits.requires_grad_(of_loss is not None))
    num_classes, mesh = (read.shape[-1], None) if head.classes is None else (head.classes.num, head.classes.mesh)
    loss, saved = vocabulary_loss.forward(call, read.detach(), num_classes, mesh)
    if of_loss is None:
        return loss, None
    gradient = vocabulary_loss.backward(saved, of_loss).to(read.dtype)
    return loss, torch.autograd.grad(read, logits, gradient)[0] if head.epilogue else gradient


def chunk_length(num_rows: int, num_classes: int, device_type: str) -> int:
    """Rows of a chunk, at most."""
    least = LEAST_LOGITS if device_type == "cpu" else LEAST_LOGITS_OF_GPU
    return max(-(-num_rows // MOST_CHUNKS), -(-least // num_classes))


def chunks(num_rows: int, num_classes: int, device_type: str) -> Iterator[slice]:
    """The rows of each chunk, given how many logits a row has on a rank."""
    length = chunk_length(num_rows, num_classes, device_type)
    for start in range(0, num_rows, length):
        yield slice(start, min(start + length, num_rows))


def _normaliser(call: CrossEntropy) -> Tensor:
    """That of a mean."""
    counted = call.target != call.ignore_index
    if call.weight is None:
        return counted.sum()
    weights = call.weight[torch.where(counted, call.target, 0)]
    return torch.where(counted, weights, 0.0).sum(dtype=torch.promote_types(weights.dtype, torch.float32))


def _refuse_second_order() -> None:
    """In a backward.

    Raises:
        PlanError: the gradient of its gradients may be asked for.
    """
    if torch.is_grad_enabled():
        raise PlanError(
            "create_graph=True: gradients of gradients through a cross entropy that makes no logits are not built. Set"
            " activations.fused_loss='never', and with tensor parallel let tensor.plan replicate the head."
        )


class _Loss(torch.autograd.Function):
    """rows, seed of the weights -> the loss."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, seed: Tensor, gradients: _Gradients) -> Tensor:
        ctx.gradients = gradients
        is_early = gradients.has_backward and not gradients.comes_late
        weight, bias = gradients.weight, gradients.bias
        loss, made = gradients.run(
            rows,
            None,
            of_rows=is_early and rows.requires_grad,
            of_weight=is_early and weight is not None and weight.requires_grad,
            of_bias=is_early and bias is not None and bias.requires_grad,
        )
        ctx.is_early, gradients.made = is_early, made if is_early else None
        ctx.save_for_backward(made.rows if is_early else rows, None if is_early else weight)
        made.rows = None
        return loss

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor, None]:
        if not ctx.needs_input_grad[0]:
            return None, gradient, None
        _refuse_second_order()
        saved, _ = ctx.saved_tensors  # raises where the rows or the weight were changed in place
        if ctx.is_early:
            return saved * gradient.to(saved.dtype).reshape(-1, 1), gradient, None
        return ctx.gradients.run(saved, gradient, of_rows=True)[1].rows, gradient, None


class _Weights(torch.autograd.Function):
    """weight, bias -> what stands for them in the graph of the loss; gets the gradient of the loss."""

    @staticmethod
    def forward(
        ctx: Any,
        weight: Tensor | None,
        bias: Tensor | None,
        rows: Tensor,
        gradients: _Gradients,
        shape: Sequence[int],
    ) -> Tensor:
        ctx.gradients = gradients
        ctx.save_for_backward(rows)
        ctx.dtypes = [None if tensor is None else tensor.dtype for tensor in (weight, bias)]
        return torch.zeros(shape, dtype=gradients.wide, device=rows.device)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, None, None, None]:
        gradients: _Gradients = ctx.gradients
        of_weight, of_bias = ctx.needs_input_grad[:2]
        _refuse_second_order()
        made, gradients.made = gradients.made, None
        if made is None:
            (rows,) = ctx.saved_tensors
            made = gradients.run(rows, gradient, of_weight=of_weight, of_bias=of_bias)[1]
        else:  # the first backward, which nobody shares them with
            for part in (made.weight, made.bias):
                if part is not None:
                    part.mul_(gradient)
        weight = made.weight.to(ctx.dtypes[0]) if of_weight and made.weight is not None else None
        bias = made.bias.to(ctx.dtypes[1]) if of_bias and made.bias is not None else None
        return weight, bias, None, None, None
