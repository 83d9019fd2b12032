"""The process groups that the meshes of one process share, and that are destroyed when no mesh has them any more.

A group takes threads and sockets of gloo, or memory of NCCL. So a mesh takes those that link the same ranks from a mesh
before it, and makes only what is missing. Two axes of one mesh have two groups, also where they link the same ranks, as
their messages may cross; only those of one rank alone are one. The default group is taken, too, unless gloo runs it in
several threads, in which DTensors must not be gathered (see ``torch_internals/process_groups.py``).

    a mesh takes groups       the first of each kind that it has not taken, or a new one; every rank takes alike
    nobody has the mesh       no Trainer, model, copy of it, or DTensor that uses it is left on this rank
    the next run begins       the groups that are needed on no rank are destroyed, in the same order everywhere

Destroying is a collective, so it is never left to the garbage collector of one rank.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Collection, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from datetime import timedelta

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from lightning_3d.torch_internals.dtensor import clear_caches
from lightning_3d.torch_internals.process_groups import num_gloo_threads, one_gloo_thread

RankSets = tuple[tuple[int, ...], ...]
"""Ranks that are linked, set by set; no rank is in two of them."""


@dataclass(eq=False, slots=True, kw_only=True)
class _Kept:
    """A group for each of some sets of ranks."""

    sets: RankSets
    timeout: timedelta | None
    runs_callbacks: bool

    group: dist.ProcessGroup | None
    """That of this rank; None where it is in no set."""

    users: list[weakref.ref[DeviceMesh]] = field(default_factory=list)
    """Meshes that have taken it, the whole ones and not their axes."""

    is_spoilt: bool = False
    """Whether a run that failed may have left messages in it."""

    @property
    def is_used(self) -> bool:
        return any(user() is not None for user in self.users)


KeptState = tuple[bool, bool]
"""Whether a group is used on a rank, and whether it is spoilt."""


class GroupPool:
    """The groups that were made beside a default process group, in the same order on all ranks."""

    def __init__(self) -> None:
        self._default = dist.group.WORLD
        self._kept: list[_Kept] = []

    @property
    def is_current(self) -> bool:
        """Whether the default process group is still the same; they are all destroyed with it."""
        return self._default is dist.group.WORLD

    def take(
        self, sets: RankSets, timeout: timedelta | None, besides: Collection[_Kept], *, runs_callbacks: bool
    ) -> _Kept:
        """A group that links these ranks and is none of some others. Every rank takes the same, in the same order.

        Args:
            runs_callbacks: Whether callbacks of its collectives wait for further ones, for which gloo needs threads as
                torch gives it; DTensors must not be gathered in it.
        """
        wanted = sets, timeout, runs_callbacks
        for kept in self._kept:
            is_alike = (kept.sets, kept.timeout, kept.runs_callbacks) == wanted
            if is_alike and not kept.is_spoilt and kept not in besides:
                return kept
        with nullcontext() if runs_callbacks else one_gloo_thread():
            if sets == tuple((rank,) for rank in range(dist.get_world_size())):
                # One call on each rank, not one for each rank: they have one name, but nobody to meet under it.
                group = dist.new_group([dist.get_rank()], timeout=timeout)
            else:
                group, _ = dist.new_subgroups_by_enumeration([list(ranks) for ranks in sets], timeout=timeout)
        kept = _Kept(sets=sets, timeout=timeout, runs_callbacks=runs_callbacks, group=group)
        self._kept.append(kept)
        return kept

    def spoil(self) -> None:
        """Let no further mesh take the groups that there are."""
        for kept in self._kept:
            kept.is_spoilt = True

    def states(self, present: DeviceMesh | None) -> list[KeptState]:
        """The state of each group on this rank.

        Args:
            present: A mesh that is used again.
        """
        users = [user() for kept in self._kept for user in kept.users]
        has_others = any(user is not None and user is not present for user in users)
        del users
        if has_others:  # perhaps only in garbage, and in what DTensor remembers of operators
            clear_caches()
            gc.collect()
        return [(kept.is_used, kept.is_spoilt) for kept in self._kept]

    def agree(self, everyone: Sequence[Sequence[KeptState]]) -> list[_Kept]:
        """Take over what other ranks know; returns the groups that no rank uses.

        Args:
            everyone: The states of each rank.
        """
        unused = []
        for kept, states in zip(self._kept, zip(*everyone, strict=True), strict=True):
            kept.is_spoilt = any(is_spoilt for _, is_spoilt in states)
            if not any(is_used for is_used, _ in states):
                unused.append(kept)
        return unused

    def destroy(self, unused: Sequence[_Kept]) -> None:
        """Destroy groups that no mesh has taken meanwhile. Every rank calls it with the same."""
        for kept in unused:
            if not kept.is_used:
                self._kept.remove(kept)
                if kept.group is not None:
                    dist.destroy_process_group(kept.group)


class MeshGroups:
    """The groups of one mesh.

    Args:
        timeout: Of their collectives.
        device_type: Where the tensors of its collectives lie.
    """

    def __init__(self, pool: GroupPool, timeout: timedelta | None = None, device_type: str = "cpu") -> None:
        self._pool, self._timeout, self._device_type = pool, timeout, device_type
        self._taken: list[_Kept] = []
        self._shared: dict[tuple[RankSets, bool], dist.ProcessGroup | None] = {}
        self._mesh: weakref.ref[DeviceMesh] | None = None
        self._has_default = False

    def take(self, sets: Sequence[Sequence[int]], *, runs_callbacks: bool = False) -> dist.ProcessGroup | None:
        """Another group than those before, or None where this rank is in no set. Every rank takes the same.

        Args:
            runs_callbacks: As for `GroupPool.take`.
        """
        wanted = tuple(map(tuple, sets))
        is_world = wanted == (tuple(range(dist.get_world_size())),)
        if is_world and not runs_callbacks and not self._has_default:
            self._has_default = True
            assert dist.group.WORLD is not None
            if num_gloo_threads(dist.group.WORLD, self._device_type) <= 1:
                return dist.group.WORLD
        is_alone = all(len(ranks) == 1 for ranks in wanted)
        besides = () if is_alone else self._taken
        kept = self._pool.take(wanted, self._timeout, besides, runs_callbacks=runs_callbacks)
        if kept not in self._taken:
            self._taken.append(kept)
            if self._mesh is not None:
                kept.users.append(self._mesh)
        return kept.group

    def take_once(self, sets: Sequence[Sequence[int]], *, runs_callbacks: bool = False) -> dist.ProcessGroup | None:
        """The same, and always the same one for the same arguments."""
        wanted = tuple(map(tuple, sets)), runs_callbacks
        if wanted not in self._shared:
            self._shared[wanted] = self.take(sets, runs_callbacks=runs_callbacks)
        return self._shared[wanted]

    def serve(self, mesh: DeviceMesh) -> None:
        """Keep all these groups as long as there is a mesh."""
        self._mesh = weakref.ref(mesh)
        for kept in self._taken:
            kept.users.append(self._mesh)
