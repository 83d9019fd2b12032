"""Dropout on shards: every rank drops what one process drops.

The ranks of a group have default generators that are alike, for what is replicated. A call on shards draws all numbers
that one process draws for the whole tensor, in the order in which that lies in memory, and a rank takes those of its
own part. So all generators go on as those of one process, and recomputation, which restores them, draws the same again.
A rank holds the numbers of the whole for a moment.

What can't be drawn ahead, as dropout inside of a fused kernel of attention, draws other numbers on every rank
(`seeded_for_rank`).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_3d.sharding.axis import Axis
from lightning_3d.sharding.placement import Sharded, full_shape
from lightning_3d.sharding.rules.call import LocalCall, TorchCall
from lightning_3d.sharding.sharded_tensor import placement_of

# ------------------------------------------------------------------------------------------------------------- rules


def drop(call: TorchCall, axis: Axis) -> LocalCall | None:
    """Elementwise dropout of this rank's part."""
    read = _functional_dropout if call.function is F.dropout else _torch_dropout
    input, p, is_training, inplace = read(*call.args, **call.kwargs)
    at = placement_of(input)
    if at is None:
        return None

    def run(local: Tensor) -> Tensor:
        if not is_training or not draws(p):
            return F.dropout(local, p, is_training, inplace)
        return apply_drops(local, own_drops(local, at, axis, p, is_fused=_is_fused(local, inplace)), p, inplace)

    return LocalCall(tensors=(input,), input_placements=(at,), run=run, result=at)


def _functional_dropout(
    input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
) -> tuple[Tensor, float, bool, bool]:
    return input, p, training, inplace


def _torch_dropout(input: Tensor, p: float, train: bool) -> tuple[Tensor, float, bool, bool]:
    return input, p, train, False


def draws(p: float) -> bool:
    """Whether dropout of this probability draws anything; others leave all or nothing."""
    return 0.0 < p < 1.0


def _is_fused(tensor: Tensor, inplace: bool) -> bool:
    """Whether torch drops by one kernel that draws, too."""
    return tensor.device.type != "cpu" and not inplace


# ------------------------------------------------------------------------------------------------------ own numbers


def own_drops(local: Tensor, placement: Sharded, axis: Axis, p: float, *, is_fused: bool) -> Tensor:
    """This rank's part of what dropout draws for a whole tensor: factors of its elements, or which of them are kept.

    Args:
        is_fused: Whether torch's kernel that draws while it computes gives the numbers.
    """
    shape, stride = _whole_layout(local, full_shape(local.shape, placement, axis.size))
    blank = torch.empty_strided(shape, stride, dtype=local.dtype, device=local.device)
    drawn = torch.native_dropout(blank, p, True)[1] if is_fused else blank.bernoulli_(1.0 - p).div_(1.0 - p)
    return placement.own(drawn, axis.size, axis.rank).clone()  # so that the whole is freed


def apply_drops(input: Tensor, drops: Tensor, p: float, inplace: bool = False) -> Tensor:
    """The tensor after dropout."""
    if drops.dtype == torch.bool:
        return input * drops * (1.0 / (1.0 - p))
    return input.mul_(drops) if inplace else input * drops


def _whole_layout(local: Tensor, shape: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shape and strides of a new tensor of that shape, whose dims lie in memory in the order of those of a part."""
    own_shape, stride = local.shape, list(local.stride())
    for i in reversed(range(local.dim())):  # an expanded dim stays where it stands
        if stride[i] == 0 and own_shape[i] > 1:
            stride[i] = stride[i + 1] * own_shape[i + 1] if i + 1 < local.dim() else 1
    # Of equal strides that of a dim of one element is the inner one.
    inner_first = sorted(range(local.dim()), key=lambda i: (-stride[i], own_shape[i] == 1, i), reverse=True)
    num_inner = 1
    for i in inner_first:
        stride[i] = num_inner
        num_inner *= shape[i]
    return shape, tuple(stride)


# ---------------------------------------------------------------------------------------------------- other numbers


@contextmanager
def seeded_for_rank(device: torch.device, rank: int) -> Iterator[None]:
    """Let `device`'s default generator draw numbers of this rank's own inside; the CPU's goes on alike on all ranks."""
    seed = int(torch.randint(2**62, (), dtype=torch.int64, device="cpu")) + rank
    with torch.random.fork_rng(devices=[device], device_type=device.type):
        torch.get_device_module(device).manual_seed(seed)
        yield
