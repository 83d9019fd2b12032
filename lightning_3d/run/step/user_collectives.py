"""Collectives that Lightning and the user's code ask for, in hooks and inside of steps.

They go over the dp axis, unless another group than that of all ranks is given: the other axes hold the same samples, or
other stages. In a step of a pipeline the stage whose tensor it is makes them, with those of the other replicas, on the
whole batch.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_3d.distributed.objects import broadcast_object
from lightning_3d.distributed.replica_world import is_of_all
from lightning_3d.errors import StepError
from lightning_3d.run.ranks import Ranks
from lightning_3d.torch_internals.fake_tensors import FakeTensor
from lightning_3d.torch_internals.lightning_helpers import reduce_tensor
from lightning_3d.trace.interception import present_step


def barrier(ranks: Ranks, device: torch.device) -> None:
    """Wait for all ranks."""
    if ranks.is_alone:
        return
    _refuse_in_stages(ranks, "barrier")
    ranks.rendezvous.sync_point()
    dist.barrier(device_ids=[device.index] if dist.get_backend() == "nccl" else None)


def broadcast(ranks: Ranks, obj: object, device: torch.device, src: int) -> Any:
    """Send an object of one rank to all."""
    if ranks.is_alone:
        return obj
    _refuse_in_stages(ranks, "broadcast")
    ranks.rendezvous.sync_point()
    return broadcast_object(obj, device, src=src)


def decide_together(ranks: Ranks, decision: bool, device: torch.device, *, all: bool) -> bool:
    """Whether all ranks have decided for something, or any has."""
    if ranks.is_alone:
        return decision
    ranks.rendezvous.sync_point()
    flag = torch.tensor(int(decision), device=device)
    dist.all_reduce(flag, dist.ReduceOp.MIN if all else dist.ReduceOp.MAX)
    return bool(flag)


def all_gather(ranks: Ranks, tensor: Tensor, group: object, *, sync_grads: bool) -> Tensor:
    """Stack the tensors of all replicas."""
    if group is None:  # else not all ranks need come here
        ranks.rendezvous.sync_point()
    over = _group(ranks, group, "all_gather")

    def joint(tensor: Tensor) -> Tensor:
        with nullcontext() if sync_grads else torch.no_grad():
            stacked: Tensor = _Stacked.apply(tensor, over)  # type: ignore[no-untyped-call]  # torch 2.13
            return stacked

    def alone(tensor: Tensor) -> Tensor:
        with nullcontext() if sync_grads else torch.no_grad():
            return torch.stack([tensor] * dist.get_world_size(over))

    return _answer("all_gather", joint, alone, tensor)


def reduce(ranks: Ranks, tensor: Tensor | Any, group: Any, reduce_op: Any) -> Any:
    """Join the tensors of all replicas, in place; what is no tensor stays."""
    if not isinstance(tensor, Tensor) or ranks.is_alone:
        return tensor
    if group is None:
        ranks.rendezvous.sync_point()
    over = _group(ranks, group, "reduce")

    def joint(tensor: Tensor) -> Tensor:
        return reduce_tensor(tensor, over, reduce_op=reduce_op)

    def alone(tensor: Tensor) -> Tensor:
        with torch.no_grad():
            return tensor.mul_(1)

    return _answer("reduce", joint, alone, tensor)


def _is_in_stages(ranks: Ranks) -> bool:
    return ranks.mesh.shape.pp > 1 and present_step() is not None


def _refuse_in_stages(ranks: Ranks, name: str) -> None:
    """Raise for a collective of all ranks in a step of a pipeline."""
    if _is_in_stages(ranks):
        raise StepError(
            f"trainer.strategy.{name} was called in a step, but with a pipeline not every stage gets to each line of"
            " it, and those that do for each microbatch. Call it in a hook, such as on_train_batch_end."
        )


def _group(ranks: Ranks, group: object, name: str) -> Any:
    samples = ranks.mesh.group("samples")
    if is_of_all(group, samples):
        return samples
    if _is_in_stages(ranks):
        raise StepError(
            f"{name} over a group of its own was called in a step, but with a pipeline one stage calls it, and not"
            " every rank of that group may be on it. Leave the group out: it is that of the replicas."
        )
    return group


class _Stacked(torch.autograd.Function):
    """All-gather along a new first dimension; the gradient of a rank's tensor is the sum of those on all ranks.

    That of torch 2.13 (``torch.distributed.nn``) takes ranks of a group for global ones with gloo.
    """

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        gathered = tensor.new_empty((dist.get_world_size(group), *tensor.shape))
        dist.all_gather_single(gathered.view(-1), tensor.contiguous().view(-1), group=group)
        return gathered

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        own = gradient.new_empty(gradient.shape[1:])
        dist.reduce_scatter_single(own.view(-1), gradient.contiguous().view(-1), group=ctx.group)
        return own, None


def _answer(name: str, joint: Any, alone: Any, tensor: Tensor) -> Tensor:
    step = present_step()
    if step is not None:
        return step.on_collective(name, joint, alone, tensor)
    answer: Tensor = (alone if isinstance(tensor, FakeTensor) else joint)(tensor)
    return answer
