"""The axis along which sequences are cut: the collectives of every axis, one that sends rows, and passing round."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_3d.model.block_runner import is_own
from lightning_3d.sharding.axis import MeshAxis
from lightning_3d.torch_internals.autograd import function_of


class ContextAxis(MeshAxis):
    """A mesh axis that also sends rows of tensors from any rank to any, and tensors from each rank to the next."""

    def exchange(self, rows: Tensor, sent: Sequence[int], received: Sequence[int]) -> Tensor:
        """Send rows (along dim 0), so many to each rank in turn; returns those that come, by rank."""
        came = rows.new_empty(sum(received), *rows.shape[1:])
        dist.all_to_all_single(came, rows.contiguous(), list(received), list(sent), group=self._group)
        return came

    def pass_on(self, tensor: Tensor, coming: Tensor) -> Callable[[], Tensor]:
        """Begin to send a tensor to the next rank, the first after the last, and to receive one from the rank before.

        Args:
            tensor: Contiguous; it must stay as it is until then.
            coming: The memory for the other. Of no elements nothing is sent.

        Returns:
            Waits for both, and gives `coming`.
        """
        ways = ((dist.isend, tensor, self.rank + 1), (dist.irecv, coming, self.rank - 1))
        operations = [
            dist.P2POp(operation, moved, group=self._group, group_peer=peer % self.size)
            for operation, moved, peer in ways
            if moved.numel()
        ]
        works = dist.batch_isend_irecv(operations) if operations else []

        def wait() -> Tensor:
            for work in works:
                work.wait()
            return coming

        return wait


def exchanged_rows(
    local: Tensor, axis: ContextAxis, dim: int, sends: Sequence[Tensor], received: Sequence[int]
) -> Tensor:
    """The rows along a dim that this rank gets from all.

    Args:
        local: This rank's rows.
        sends: By rank the indices of own rows that go there.
        received: How many come from each.
    """
    return cast(Tensor, _ExchangedRows.apply(local, axis, dim, sends, received))  # type: ignore[no-untyped-call]


class _ExchangedRows(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, local: Tensor, axis: ContextAxis, dim: int, sends: Sequence[Tensor], received: Sequence[int]
    ) -> Tensor:
        ctx.axis, ctx.dim, ctx.sends, ctx.received, ctx.length = axis, dim, sends, received, local.shape[dim]
        picked = local.index_select(dim, torch.cat(list(sends))).movedim(dim, 0)
        return axis.exchange(picked, [len(rows) for rows in sends], received).movedim(0, dim)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        back = ctx.axis.exchange(gradient.movedim(ctx.dim, 0), ctx.received, [len(rows) for rows in ctx.sends])
        own = back.new_zeros(ctx.length, *back.shape[1:]).index_add_(0, torch.cat(list(ctx.sends)), back)
        return own.movedim(0, ctx.dim), None, None, None, None


def comes_of_weights(tensor: Tensor) -> bool:
    """Whether a tensor was made of nothing but parameters, alike on all ranks, as a transposed weight is."""
    waiting, count = [tensor.grad_fn], 0
    while waiting and count <= _MAX_NODES:
        node, count = waiting.pop(), count + 1
        if node is None:
            continue
        function = function_of(node)
        if function is not None and is_own(function.__module__) and not getattr(function, "gives_weight", False):
            return False  # it may have communicated
        if node.name() == "torch::autograd::AccumulateGrad":
            if not isinstance(node.variable, nn.Parameter):  # type: ignore[attr-defined]
                return False
        else:
            waiting += [following for following, _ in node.next_functions]
    return count <= _MAX_NODES


_MAX_NODES = 30
"""Nodes of a graph that are looked at."""
