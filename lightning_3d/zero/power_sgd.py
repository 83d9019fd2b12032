"""Gradient compression at stage 0: PowerSGD with error feedback (Vogels et al. 2019), by torch's hook for DDP."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook

_EPSILON = 1e-8  # for gradients that are zero, whose directions can't be normalised
_NOISE = 1e-6


class PowerSGD:
    """Takes the mean of a bucket's gradients over the ranks in matrices of low rank; remembers what each left out.

    Args:
        rank: Of the matrices.
        start: Reductions that go before without compression; at least 2.
        seed: Of the first directions.
    """

    def __init__(self, group: dist.ProcessGroup, *, rank: int, start: int, seed: int) -> None:
        self._state: Any = PowerSGDState(group, rank, start, orthogonalization_epsilon=_EPSILON, random_seed=seed)

    def mean(self, flat: Tensor, gradients: Sequence[Tensor]) -> None:
        """Replace gradients by their approximate mean; every rank calls it.

        It waits: torch's hook begins its second and third collective where the one before ends, and gloo would mix up
        those of two buckets.

        Args:
            flat: All of them, of shape (n,).
            gradients: Its parts, none of them 0-d.
        """
        bucket: object = _Bucket(flat=flat, parts=tuple(gradients))
        flat.copy_(powerSGD_hook(self._state, bucket).wait())
        for directions in self._state.q_memory_dict.values():
            self._wake(directions)

    def _wake(self, directions: Tensor) -> None:
        """A gradient of zero leaves no directions to begin with in the next step, in which it would vanish as well."""
        generator = torch.Generator().manual_seed(self._state.iter)
        noise = torch.randn(directions.shape, generator=generator).to(directions)
        torch.where(directions == 0, noise * _NOISE, directions, out=directions)


@dataclass(frozen=True, kw_only=True)
class _Bucket:
    """The properties of DDP's buckets that the hook reads."""

    flat: Tensor
    parts: tuple[Tensor, ...]

    def index(self) -> int:
        return 0

    def buffer(self) -> Tensor:
        return self.flat

    def gradients(self) -> list[Tensor]:
        return list(self.parts)

    def is_last(self) -> bool:
        return True
