"""Dropout on shards: other numbers on every rank, and yet the own generators of all ranks stay in step.

Replicated regions draw from the default generators, which are alike on the ranks of a group. DTensor has a random
number tracker on GPUs only, so on a CPU mesh every shard would get the same mask. Here each random call on shards takes
one number from the CPU's default generator, the same on all ranks, and derives a seed per rank from it. Recomputation
restores that generator, and with it the masks.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_3d.tensor.axis import Axis
from lightning_3d.tensor.placement import Sharded
from lightning_3d.tensor.rules.call import Call, LocalCall
from lightning_3d.tensor.sharded_tensor import placement_of


def drop(call: Call, axis: Axis) -> LocalCall | None:
    """Elementwise dropout: every rank drops elements of its own part."""
    read = _functional_dropout if call.function is F.dropout else _torch_dropout
    input, p, is_training = read(*call.args, **call.kwargs)
    at = placement_of(input)
    if not isinstance(at, Sharded):
        return None

    def run(local: Tensor) -> Tensor:
        return dropout_shard(local, p, axis.rank) if is_training else local

    return LocalCall(tensors=(input,), needs=(at,), run=run, result=at)


def _functional_dropout(
    input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
) -> tuple[Tensor, float, bool]:
    return input, p, training  # the result is used, so in place or not is the same


def _torch_dropout(input: Tensor, p: float, train: bool) -> tuple[Tensor, float, bool]:
    return input, p, train


def draw_seed(rank: int) -> int:
    """A seed of its own for each rank; advances the CPU's default generator alike on all."""
    return int(torch.randint(2**62, (), dtype=torch.int64, device="cpu")) + rank


def dropout_shard(shard: Tensor, p: float, rank: int) -> Tensor:
    """``F.dropout`` in training on this rank's shard, with probability `p` of a zero, ``0 <= p <= 1``."""
    if p == 0.0:
        return shard
    generator = torch.Generator(shard.device).manual_seed(draw_seed(rank))
    kept = torch.empty_like(shard, requires_grad=False).bernoulli_(1.0 - p, generator=generator)
    return shard * kept if p == 1.0 else shard * kept.div_(1.0 - p)


@contextmanager
def seeded_for_rank(device: torch.device, rank: int) -> Iterator[None]:
    """Run a call that can only draw from `device`'s default generator with numbers of this rank's own."""
    seed = draw_seed(rank)
    if device.type == "cpu":
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(seed)
            yield
    else:
        with torch.random.fork_rng(devices=[device], device_type=device.type):
            torch.get_device_module(device).manual_seed(seed)
            yield
