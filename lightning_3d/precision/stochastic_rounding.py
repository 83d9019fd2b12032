"""Rounding fp32 to bf16 up or down by chance, so that small changes count on average (Zamirai et al. 2020).

bf16 is the upper half of fp32: 16 random bits added to the lower half carry into the upper one with the probability
that the lower half is of one step.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_3d.zero.shard import RankShard


def round_stochastically(values: Tensor, generator: torch.Generator) -> Tensor:
    """Round fp32 values to bf16, with the mean of the values; infinities and NaN stay."""
    bits = values.view(torch.int32)
    noise = torch.randint(0, 1 << 16, bits.shape, dtype=torch.int32, device=bits.device, generator=generator)
    rounded = ((bits + noise) & -(1 << 16)).view(torch.float32)
    return torch.where(values.isfinite(), rounded, values).to(torch.bfloat16)


class StochasticRounding:
    """Rounds the parts of parameters after a step. Ranks that hold the same part round it alike.

    Args:
        names: Parameter -> its FQN.
        seed: Equal on all ranks.
        device: The strategy's.
    """

    def __init__(
        self,
        shards: Mapping[nn.Parameter, RankShard],
        names: Mapping[nn.Parameter, str],
        *,
        seed: int,
        device: torch.device,
    ) -> None:
        self._shards, self._names, self._seed = shards, names, seed
        self._generator = torch.Generator(device)
        self._num_steps: Counter[nn.Parameter] = Counter()

    def __call__(self, parameter: nn.Parameter, own: Tensor, values: Tensor) -> None:
        """Write the rounded values to a part of a parameter."""
        self._num_steps[parameter] += 1
        shard = self._shards[parameter]
        place = [shard.rank if shard.is_dealt else 0]
        if isinstance(parameter, DTensor):
            mesh = parameter.device_mesh
            sharded = [axis for axis, placement in enumerate(parameter.placements) if not placement.is_replicate()]
            place += [mesh.get_local_rank(axis) for axis in sharded]
        key = repr((self._seed, self._names[parameter], place, self._num_steps[parameter]))
        self._generator.manual_seed(int.from_bytes(hashlib.blake2b(key.encode(), digest_size=7).digest()))
        own.copy_(round_stochastically(values.to(self._generator.device), self._generator))
