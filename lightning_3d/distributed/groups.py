"""The process groups of a mesh.

Two axes have two groups, also where they link the same ranks, as their messages may cross; those along which each rank
is alone have one together. The default group is the first that links all ranks, unless gloo runs it in several threads,
in which DTensors must not be gathered (see ``torch_internals/process_groups.py``).
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from datetime import timedelta

import torch.distributed as dist

from lightning_3d.torch_internals.process_groups import num_gloo_threads, one_gloo_thread


class MeshGroups:
    """Makes groups; every rank calls its methods alike, in the same order.

    Args:
        timeout: Of their collectives.
        device_type: Where the tensors of its collectives lie.
    """

    def __init__(self, timeout: timedelta | None = None, device_type: str = "cpu") -> None:
        self._timeout, self._device_type = timeout, device_type
        self._shared: dict[tuple[tuple[tuple[int, ...], ...], bool], dist.ProcessGroup | None] = {}
        self._has_default = False

    def make(self, sets: Sequence[Sequence[int]], *, runs_callbacks: bool = False) -> dist.ProcessGroup | None:
        """Another group than those before, or None where this rank is in no set; no rank is in two of them.

        Args:
            runs_callbacks: Whether callbacks of its collectives wait for further ones, for which gloo needs threads as
                torch gives it; DTensors must not be gathered in it.
        """
        everyone, world = list(range(dist.get_world_size())), dist.group.WORLD
        if [list(ranks) for ranks in sets] == [everyone] and not runs_callbacks and not self._has_default:
            self._has_default = True
            assert world is not None
            if num_gloo_threads(world, self._device_type) <= 1:
                return world
        group: dist.ProcessGroup | None
        with nullcontext() if runs_callbacks else one_gloo_thread():
            if [list(ranks) for ranks in sets] == [[rank] for rank in everyone]:
                # One call on each rank, not one for each rank: they have one name, but nobody to meet under it.
                group = dist.new_group([dist.get_rank()], timeout=self._timeout)
            else:
                group, _ = dist.new_subgroups_by_enumeration([list(ranks) for ranks in sets], timeout=self._timeout)
        return group

    def make_once(self, sets: Sequence[Sequence[int]], *, runs_callbacks: bool = False) -> dist.ProcessGroup | None:
        """The same, and always the same one for the same arguments."""
        wanted = tuple(map(tuple, sets)), runs_callbacks
        if wanted not in self._shared:
            self._shared[wanted] = self.make(sets, runs_callbacks=runs_callbacks)
        return self._shared[wanted]
