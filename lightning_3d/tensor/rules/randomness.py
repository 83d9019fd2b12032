"""Dropout on shards: other numbers on every rank, and yet the own generators of all ranks stay in step.

Replicated regions draw from the default generators, which are alike on the ranks of a group. DTensor has a random
number tracker on GPUs only, so on a CPU mesh every shard would get the same mask. Here each random call on shards takes
one number from the CPU's default generator, the same on all ranks, and derives a seed per rank from it. Recomputation
restores that generator, and with it the masks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar

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
    input, p, is_training, inplace = read(*call.args, **call.kwargs)
    at = placement_of(input)
    if not isinstance(at, Sharded):
        return None

    def run(local: Tensor) -> Tensor:
        return F.dropout(local, p, is_training, inplace)

    is_random = is_training and p > 0.0
    return LocalCall(tensors=(input,), needs=(at,), run=run, result=at, is_random=is_random)


def _functional_dropout(
    input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
) -> tuple[Tensor, float, bool, bool]:
    return input, p, training, inplace


def _torch_dropout(input: Tensor, p: float, train: bool) -> tuple[Tensor, float, bool, bool]:
    return input, p, train, False


def draw_seed(rank: int) -> int:
    """A seed of its own for each rank; advances the CPU's default generator alike on all."""
    return int(torch.randint(2**62, (), dtype=torch.int64, device="cpu")) + rank


_Seeded = Callable[[torch.device, int], AbstractContextManager[None]]


def seeded_for_rank(device: torch.device, rank: int) -> AbstractContextManager[None]:
    """Run a call, which draws from `device`'s default generator, with numbers of this rank's own."""
    return _SEEDED.get()(device, rank)


@contextmanager
def seeds_taken_by(seeded: _Seeded) -> Iterator[None]:
    """Let `seeded` take the place of `seeded_for_rank` inside."""
    token = _SEEDED.set(seeded)
    try:
        yield
    finally:
        _SEEDED.reset(token)


def _seeded_anew(device: torch.device, rank: int) -> AbstractContextManager[None]:
    return seeded(device, draw_seed(rank))


_SEEDED: ContextVar[_Seeded] = ContextVar("seeded", default=_seeded_anew)


@contextmanager
def seeded(device: torch.device, seed: int) -> Iterator[None]:
    """Seed the default generators of the CPU or of `device` inside, and restore them afterwards."""
    if device.type == "cpu":
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(seed)
            yield
    else:
        with torch.random.fork_rng(devices=[device], device_type=device.type):
            torch.get_device_module(device).manual_seed(seed)
            yield
