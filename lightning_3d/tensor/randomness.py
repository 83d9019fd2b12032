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
from torch import Tensor


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
