"""Which rank is what: the shape of the mesh, the coordinate of each rank on it, and the process groups along it.

`resolve_mesh_shape` and `MeshShape` are pure, so a mesh of any size can be planned in one process; `build_mesh` makes
the process groups. The axes are the rows of `axes.py`. Nothing here communicates beyond making groups.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from math import prod
from typing import Literal

import torch
import torch.distributed as dist
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from lightning_3d.config.settings import ThreeDConfig
from lightning_3d.distributed.axes import AXES, ROLES, AxisName, Role
from lightning_3d.distributed.groups import MeshGroups
from lightning_3d.errors import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class MeshCoordinate:
    """The index of one rank along each axis."""

    pp: int
    dp: int
    cp: int
    tp: int


@dataclass(frozen=True, kw_only=True, slots=True)
class MeshShape:
    """The number of ranks along each axis, outermost first."""

    pp: int = 1
    dp: int = 1
    cp: int = 1
    tp: int = 1

    @property
    def sizes(self) -> dict[AxisName, int]:
        """By axis, outermost first."""
        return {axis.name: getattr(self, axis.name) for axis in AXES}

    @property
    def world_size(self) -> int:
        """The number of all ranks."""
        return prod(self.sizes.values())

    def size(self, role: Role) -> int:
        """The number of ranks of a group of a role."""
        return prod(self.sizes[name] for name in ROLES[role])

    @property
    def model_size(self) -> int:
        """The number of ranks that hold parts of one copy of the model, whatever ZeRO does."""
        return prod(self.sizes[axis.name] for axis in AXES if axis.cuts_model)

    @property
    def is_model_parallel(self) -> bool:
        """Whether ranks hold parts of the model, whatever ZeRO does."""
        return self.model_size > 1

    @property
    def text(self) -> str:
        """Such as ``pipeline 2 x data 1 x tensor 4``; context where it has several ranks."""
        shown = [axis for axis in AXES if axis.cuts != "sequence" or self.sizes[axis.name] > 1]
        return " x ".join(f"{axis.label} {self.sizes[axis.name]}" for axis in shown)

    @property
    def short_text(self) -> str:
        """Such as ``pipeline 2 x tensor 4``: the axes that have several ranks."""
        shown = [f"{axis.label} {self.sizes[axis.name]}" for axis in AXES if self.sizes[axis.name] > 1]
        return " x ".join(shown) or "one rank"

    @property
    def settings(self) -> dict[str, int]:
        """The sizes as `ThreeDConfig` has them."""
        return {axis.setting: self.sizes[axis.name] for axis in AXES}

    def coordinate(self, rank: int) -> MeshCoordinate:
        """The coordinate of a global rank, ``0 <= rank < world_size``."""
        assert 0 <= rank < self.world_size, f"rank {rank} is outside a mesh of {self.world_size}"
        indices: dict[AxisName, int] = {}
        for name, size in reversed(self.sizes.items()):
            rank, indices[name] = divmod(rank, size)
        return MeshCoordinate(**indices)

    def ranks_along(self, names: Collection[str]) -> list[list[int]]:
        """The sets of global ranks whose coordinates differ along these axes alone, ascending."""
        offsets, others = self._offsets(names), [name for name in self.sizes if name not in names]
        return [[first + offset for offset in offsets] for first in self._offsets(others)]

    def _offsets(self, names: Collection[str]) -> list[int]:
        """The global ranks whose coordinates are 0 but along these axes, ascending."""
        offsets = [0]
        for name, size in self.sizes.items():
            indices = range(size) if name in names else (0,)
            offsets = [offset * size + index for offset in offsets for index in indices]
        return offsets

    def replica_ranks(self, dp: int) -> list[int]:
        """The global ranks that together hold the model replica with data-parallel index `dp`, ascending.

        They work on the same batch; the first one is on the first stage.
        """
        first = self._offsets(ROLES["samples"])[dp]
        return [first + offset for offset in self._offsets(ROLES["replica"])]

    def index_in_stage(self, rank: int) -> int:
        """Which of the lines of `pipelines` a global rank is on."""
        return rank % (self.world_size // self.pp)

    def pipelines(self) -> list[list[int]]:
        """The global ranks along each line of the pp axis, first stage first."""
        return self.ranks_along(("pp",))


@dataclass(frozen=True, kw_only=True, slots=True)
class Mesh:
    """The mesh as seen by this process: its coordinate, and a process group along every axis."""

    shape: MeshShape
    """Sizes of the axes."""

    coordinate: MeshCoordinate
    """Place of this rank."""

    device_mesh: DeviceMesh
    """Axes ``pp, dp_replicate, dp_shard, tp``. The ranks of role *state*, those of dp and cp, lie along the two in the
    middle: replicas of the training state, and shards of it. ``dp_shard`` has size 1 at ZeRO stage 0, ``dp_replicate``
    at the others unless sharding is hybrid."""

    context: DeviceMesh
    """The axis cp alone."""

    roles: Mapping[Role, dist.ProcessGroup]
    """The group of each role, through this rank."""

    groups: MeshGroups
    """All groups of the mesh."""

    slices: dict[tuple[str, ...], DeviceMesh] = field(default_factory=dict, repr=False, compare=False)
    """The answers of `sliced` so far."""

    def __deepcopy__(self, memo: dict[int, object]) -> Mesh:
        """Itself: process groups belong to the process."""
        return self

    @property
    def pp_rank(self) -> int:
        """The pipeline stage of this rank."""
        return self.coordinate.pp

    @property
    def dp_rank(self) -> int:
        """The model replica that this rank belongs to."""
        return self.coordinate.dp

    @property
    def cp_rank(self) -> int:
        """The part of the sequence that this rank works on."""
        return self.coordinate.cp

    @property
    def tp_rank(self) -> int:
        """The shard of each block that this rank holds."""
        return self.coordinate.tp

    @property
    def num_shards(self) -> int:
        """Ranks that share the training state; each such group holds all of it."""
        return self.sliced("dp_shard").size()

    @property
    def state_rank(self) -> int:
        """The index of this rank among those of role *state*."""
        return self.coordinate.dp * self.shape.cp + self.coordinate.cp

    @property
    def is_hybrid(self) -> bool:
        """Whether groups of ranks share the training state, each all of it."""
        return 1 < self.num_shards < self.shape.size("state")

    @property
    def shard_axes(self) -> DeviceMesh:
        """The mesh that FSDP2 shards over: one axis, or with hybrid sharding the two of the state."""
        is_shared = self.num_shards == self.shape.size("state")
        return self.sliced("dp_shard") if is_shared else self.sliced("dp_replicate", "dp_shard")

    def sliced(self, *names: str) -> DeviceMesh:
        """The mesh along axes of `device_mesh`, through this rank; made once, as it is asked for by each parameter."""
        if names not in self.slices:
            self.slices[names] = self.device_mesh[names]
        return self.slices[names]

    def ranks(self, *names: str) -> list[int]:
        """The global ranks along axes of `device_mesh`, this one among them."""
        found: list[int] = self.sliced(*names).mesh.flatten().tolist()
        return found

    def axis(self, name: AxisName) -> DeviceMesh:
        """The one-dimensional mesh along an axis, through this rank; dp has none, see `shard_axes` and `group`."""
        assert name != "dp", "ranks of dp and cp lie along the axes of the state"
        return self.context if name == "cp" else self.sliced(name)

    def group(self, name: AxisName | Role) -> dist.ProcessGroup:
        """The process group along an axis, or of a role, through this rank."""
        if name == "dp":
            return self.roles["samples"]
        if name == "state" or name == "samples" or name == "replica":
            return self.roles[name]
        return self.axis(name).get_group()


def resolve_mesh_shape(config: ThreeDConfig, world_size: int) -> MeshShape:
    """Fit the configured sizes to the number of processes.

    Raises:
        ConfigError: the sizes do not divide `world_size`, an explicit `data_parallel_size` does not fill it, or
            `zero.shard_size` does not divide the data-parallel ranks.

    """
    given: dict[AxisName, int] = {axis.name: getattr(config, axis.setting) for axis in AXES if axis.has_one_batch}
    replica_size = prod(given.values())
    labels = {axis.name: axis.label for axis in AXES}
    sizes = " x ".join(f"{labels[name]} {size}" for name, size in given.items()) + f" = {replica_size}"
    if world_size % replica_size != 0:
        fitting = [multiple for multiple in (world_size // replica_size, world_size // replica_size + 1) if multiple]
        numbers = " or ".join(str(multiple * replica_size) for multiple in fitting)
        *others, last = (axis.setting for axis in AXES if axis.has_one_batch)
        raise ConfigError(
            f"world size {world_size} is not divisible by {sizes}: use {numbers} processes, or change"
            f" {', '.join(others)} or {last}"
        )
    dp = world_size // replica_size
    if config.data_parallel_size not in ("auto", dp):
        needed = replica_size * config.data_parallel_size
        raise ConfigError(
            f"data_parallel_size={config.data_parallel_size} x {sizes} needs {needed} processes, but the world size "
            f"is {world_size}: use {needed} processes, or data_parallel_size={dp} or 'auto'"
        )
    shard_size = config.zero.shard_size
    shape = MeshShape(dp=dp, **given)
    if shard_size != "auto" and (num := shape.size("state")) % shard_size:
        sizes = ", ".join(str(size) for size in range(2, num + 1) if num % size == 0)
        raise ConfigError(
            f"zero.shard_size={shard_size} does not divide the {num} ranks that hold the same weights:"
            f" use {f'{sizes}, or ' if sizes else ''}'auto'"
        )
    return shape


def refuse_unbuilt(config: ThreeDConfig, shape: MeshShape) -> None:
    """Refuse to run what can be planned alone: context parallel that is compiled, or with sequence parallel in blocks.

    Raises:
        ConfigError: That is asked for.
    """
    if shape.cp == 1:
        return
    others = ["compile.enabled=True"] if config.compile.enabled else []
    others += ["tensor.sequence_parallel=True"] if config.tensor.sequence_parallel and shape.tp > 1 else []
    if shape.pp > 1 and not config.context.gather_outputs:
        raise ConfigError(
            f"context.gather_outputs=False can't be had with pipeline_parallel_size={shape.pp}, whose last stage gives"
            " outputs of the whole batch: leave out one of them"
        )
    if others:
        raise ConfigError(
            f"context_parallel_size={shape.cp} goes with data, pipeline and tensor parallel and every stage of ZeRO,"
            f" not yet with {' or '.join(others)}: leave out one of them"
        )


def warn_of_slow_groups(shape: MeshShape, ranks_per_node: int) -> None:
    """Warn if ranks of one tensor-parallel group are on different nodes; tp is the innermost axis."""
    if shape.world_size > ranks_per_node and ranks_per_node % shape.tp:
        rank_zero_warn(
            f"tensor_parallel_size={shape.tp} with {ranks_per_node} processes per node puts tensor-parallel groups"
            " across nodes, and each block then waits for the network several times. Use a size that divides"
            f" {ranks_per_node}."
        )


def num_sharing(shape: MeshShape, *, zero_stage: int, shard_size: int | Literal["auto"]) -> int:
    """Ranks that share the training state; the settings are those of `build_mesh`."""
    if zero_stage == 0:
        return 1
    return shape.size("state") if shard_size == "auto" else shard_size


def build_mesh(
    shape: MeshShape,
    *,
    zero_stage: int,
    device_type: str,
    shard_size: int | Literal["auto"] = "auto",
    timeout: timedelta | None = None,
) -> Mesh:
    """Make a mesh and its process groups; every rank calls it at the same point, with the same arguments.

    Args:
        shape: Sizes of the axes; their product is the world size of the initialised default process group.
        zero_stage: 0 puts the data-parallel ranks on the axis ``dp_replicate``, 1 to 3 on ``dp_shard``.
        device_type: ``"cpu"``, ``"cuda"``, ...
        shard_size: Ranks along ``dp_shard``, if not all.
        timeout: Of the groups' collectives.

    """
    assert dist.get_world_size() == shape.world_size, f"{shape} does not fill a world of {dist.get_world_size()}"
    groups = MeshGroups(timeout, device_type)
    dp_shard, num_state = num_sharing(shape, zero_stage=zero_stage, shard_size=shard_size), shape.size("state")
    sizes = {"pp": shape.pp, "dp_replicate": num_state // dp_shard, "dp_shard": dp_shard, "tp": shape.tp}
    ranks = torch.arange(shape.world_size).view(*sizes.values())
    along = [ranks.movedim(axis, -1).flatten(0, -2).tolist() for axis in range(len(sizes))]
    made = [groups.make(sets) if len(sets[0]) > 1 else groups.make_once(sets) for sets in along]
    of_axes = dict(zip(sizes, map(_own, made), strict=True))
    device_mesh = DeviceMesh.from_group([*of_axes.values()], device_type, ranks, mesh_dim_names=tuple(sizes))
    roles = _roles(shape, groups, of_axes, is_hybrid=1 < dp_shard < num_state)
    return Mesh(
        shape=shape,
        coordinate=shape.coordinate(dist.get_rank()),
        device_mesh=device_mesh,
        context=_context(shape, groups, roles, device_type),
        roles=roles,
        groups=groups,
    )


def _context(
    shape: MeshShape, groups: MeshGroups, roles: Mapping[Role, dist.ProcessGroup], device_type: str
) -> DeviceMesh:
    """The axis cp, along which no training state lies."""
    sets = shape.ranks_along(("cp",))
    known = [group for group in roles.values() if dist.get_process_group_ranks(group) in sets]
    group = known[0] if known else _own(groups.make(sets) if shape.cp > 1 else groups.make_once(sets))
    return DeviceMesh.from_group(group, device_type, mesh_dim_names=("cp",))


def _roles(
    shape: MeshShape, groups: MeshGroups, of_axes: Mapping[str, dist.ProcessGroup], *, is_hybrid: bool
) -> dict[Role, dist.ProcessGroup]:
    """The group of each role, as slicing an axis flattened from a `DeviceMesh` is deprecated (torch 2.13).

    That of the state or of tp alone is theirs, whose collectives come one after the other, too.
    """
    known: dict[tuple[str, ...], dist.ProcessGroup] = {("tp",): of_axes["tp"]}
    if not is_hybrid:
        along = tuple(name for name in ROLES["state"] if shape.sizes[name] > 1) or ("dp",)
        known[along] = max(of_axes["dp_replicate"], of_axes["dp_shard"], key=dist.ProcessGroup.size)
    roles: dict[Role, dist.ProcessGroup] = {}
    for role, names in ROLES.items():
        long = tuple(name for name in names if shape.sizes[name] > 1)
        if long not in known:
            sets = shape.ranks_along(long)
            known[long] = _own(groups.make(sets) if long else groups.make_once(sets))
        roles[role] = known[long]
    return roles


def _own(group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    assert group is not None, "an axis goes through every rank"
    return group


_meshes: dict[tuple[object, ...], Mesh] = {}
"""Meshes of earlier runs, by their settings and default process group; the same on all ranks."""


def shared_mesh(
    shape: MeshShape, *, device_type: str, zero_stage: int, shard_size: int | Literal["auto"], timeout: timedelta
) -> Mesh:
    """The mesh of an earlier run, or else a new one, whose groups stay while the process lives; every rank calls it."""
    key = (shape, device_type, zero_stage, shard_size, timeout, dist.group.WORLD)
    for other in [other for other in _meshes if other[-1] is not key[-1]]:  # its groups ended with the default one
        del _meshes[other]
    if key not in _meshes:
        _meshes[key] = build_mesh(
            shape, zero_stage=zero_stage, device_type=device_type, shard_size=shard_size, timeout=timeout
        )
    return _meshes[key]


def forget_meshes() -> None:
    """Let later runs make groups of their own, as those of a run that failed may still hold its messages."""
    _meshes.clear()


def is_shard(tensor: Tensor, axis: Literal["dp_shard", "tp"] = "dp_shard") -> bool:
    """Whether the ranks of an axis, by default the data-parallel ones, share out a tensor, and this is a part of it."""
    if not isinstance(tensor, DTensor):
        return False
    names = tensor.device_mesh.mesh_dim_names or ()
    return any(name == axis and not p.is_replicate() for name, p in zip(names, tensor.placements, strict=True))
