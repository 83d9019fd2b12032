"""`DTensor.to_local` without its cost in the backward.

A block takes the shard of each of its parameters in every forward. torch 2.13's `to_local` derives the metadata of each
gradient anew, which takes 60 of the 90 us of its backward; here they are the parameter's own.
"""

from __future__ import annotations

import copy
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_3d.tensor.collectives import refuse_second_order
from lightning_3d.torch_internals.dtensor import local_tensor, spec_of
from lightning_3d.torch_internals.tensors import count_as_parameter, is_referred_to


class _OwnShard(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: DTensor) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.spec = spec_of(tensor)
        local = local_tensor(tensor)
        ctx.stride = local.stride()
        return local.view_as(local)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor | None) -> DTensor | None:
        if gradient is None:
            return None
        refuse_second_order("sharded weights")
        # Like autograd with plain parameters: a gradient that another node gets, too, is copied, as it becomes `.grad`.
        if gradient.stride() != ctx.stride or is_referred_to(gradient):
            made = torch.empty_strided(gradient.shape, ctx.stride, dtype=gradient.dtype, device=gradient.device)
            gradient = made.copy_(gradient)
        return DTensor(gradient, copy.copy(ctx.spec), requires_grad=False)


def own_shard(tensor: DTensor) -> Tensor:
    """The local part of a sharded or replicated tensor; its gradient is that part of the tensor's gradient."""
    local = cast(Tensor, _OwnShard.apply(tensor))  # type: ignore[no-untyped-call]  # torch 2.13
    if isinstance(tensor, nn.Parameter):
        count_as_parameter(local)  # what a block's code finds is an nn.Parameter to it
    return local
