"""This rank's part of a parameter that is a DTensor, as a block's code gets it."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_3d.activations.collective_mode import unseen_by_checkpoints
from lightning_3d.errors import PlanError
from lightning_3d.torch_internals.dispatch import DisableTorchFunction
from lightning_3d.torch_internals.dtensor import local_tensor, spec_of
from lightning_3d.torch_internals.tensors import count_as_parameter, is_referred_to
from lightning_3d.zero.outside_reads import unsharded, whole_of


def refuse_second_order(what: str) -> None:
    """In a backward that has no gradients of gradients.

    Raises:
        PlanError: its own gradient may be asked for.
    """
    if torch.is_grad_enabled():
        raise PlanError(
            f"create_graph=True: gradients of gradients through {what} are not built for tensor parallel. Let"
            " tensor.plan replicate the block's weights, or use tensor_parallel_size=1."
        )


class _OwnShard(torch.autograd.Function):
    """`DTensor.to_local` without its cost in the backward.

    A block takes the shard of each of its parameters in every forward. torch 2.13's `to_local` derives the metadata of
    each gradient anew, which takes 60 of the 90 us of its backward; here they are the parameter's own.
    """

    gives_weight = True
    """Whether its result counts as a weight, where a graph is asked what a tensor was made of."""

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
        return DTensor(gradient, ctx.spec, requires_grad=False)


def own_shard(tensor: DTensor) -> Tensor:
    """The local part of a sharded or replicated tensor; its gradient is that part of the tensor's gradient.

    Parameters of which ZeRO stage 3 has left each replica a share are gathered for it.
    """
    if whole_of(tensor) is not None:
        with DisableTorchFunction():
            tensor = unsharded(tensor)
    with unseen_by_checkpoints():
        local = cast(Tensor, _OwnShard.apply(tensor))  # type: ignore[no-untyped-call]  # torch 2.13
    if isinstance(tensor, nn.Parameter):
        count_as_parameter(local)  # what a block's code finds is an nn.Parameter to it
    return local
