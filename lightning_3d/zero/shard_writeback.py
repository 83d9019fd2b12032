"""Stage 3: changes of parameters in place while their unit is gathered, which FSDP2 drops with the gathered values."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from lightning_3d.torch_internals.modules import parameters_of
from lightning_3d.torch_internals.tensors import version_of
from lightning_3d.zero.shard import RankShard, plain

Slot = tuple[nn.Module, str]
"""A module, and the name of a parameter in it."""


class ShardWriteback:
    """Takes changes of a unit's gathered parameters over to this rank's rows.

    Args:
        slots: Where the unit's parameters are, sharded now.
        size: Replicas that share their rows.
        rank: This one's index among them.
    """

    def __init__(self, slots: Iterable[Slot], *, size: int, rank: int) -> None:
        self._slots = [(owner, name, parameters_of(owner)[name]) for owner, name in slots]
        self._size, self._rank = size, rank
        self._versions: dict[nn.Parameter, int] = {}

    @torch.no_grad()
    def take(self) -> None:
        """While the unit may be gathered."""
        for owner, name, sharded in self._slots:
            present = parameters_of(owner)[name]
            if present is sharded or present is None or sharded is None:
                continue
            version = version_of(plain(present))
            if version != self._versions.get(present, 0):
                self._versions[present] = version
                whole = RankShard(parameter=present, size=self._size, rank=self._rank)
                plain(sharded.detach()).copy_(whole.own(present))

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # as FSDP2's own hooks in what a user compiled
    def take_after(self, unit: nn.Module, args: object, output: object) -> None:
        """A hook after the forward of the unit, before FSDP2's."""
        self.take()
