"""Which rank is what: the shape of the mesh, the coordinate of each rank on it, and the process groups along it.

`resolve_mesh_shape` and `MeshShape` are pure, so a mesh of any size can be planned in one process; `build_mesh` makes
the process groups. Axes from outermost to innermost are pp, dp, cp, tp: consecutive ranks share blocks, so tensor
parallel stays inside a node. Nothing here communicates beyond making groups.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Literal

import torch
import torch.distributed as dist
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from lightning_3d.config.settings import ThreeDConfig
from lightning_3d.distributed.groups import MeshGroups
from lightning_3d.errors import ConfigError

AxisName = Literal["pp", "dp", "cp", "tp"]


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

    pp: int
    dp: int
    cp: int
    tp: int

    @property
    def world_size(self) -> int:
        """The number of all ranks."""
        return self.pp * self.dp * self.cp * self.tp

    @property
    def is_model_parallel(self) -> bool:
        """Whether ranks hold parts of the model, whatever ZeRO does."""
        return self.pp * self.tp > 1

    def coordinate(self, rank: int) -> MeshCoordinate:
        """The coordinate of a global rank, ``0 <= rank < world_size``."""
        assert 0 <= rank < self.world_size, f"rank {rank} is outside a mesh of {self.world_size}"
        rest, tp = divmod(rank, self.tp)
        rest, cp = divmod(rest, self.cp)
        pp, dp = divmod(rest, self.dp)
        return MeshCoordinate(pp=pp, dp=dp, cp=cp, tp=tp)

    def replica_ranks(self, dp: int) -> list[int]:
        """The global ranks that together hold the model replica with data-parallel index `dp`, ascending.

        They work on the same batch; the first one is on the first stage.
        """
        inner = self.cp * self.tp
        return [(pp * self.dp + dp) * inner + index for pp in range(self.pp) for index in range(inner)]

    def data_parallel_ranks(self) -> list[list[int]]:
        """The global ranks along each line of the dp axis, ascending."""
        inner = self.cp * self.tp
        starts = [pp * self.dp * inner + index for pp in range(self.pp) for index in range(inner)]
        return [[start + dp * inner for dp in range(self.dp)] for start in starts]

    def index_in_stage(self, rank: int) -> int:
        """Which of the lines of `pipelines` a global rank is on."""
        return rank % (self.world_size // self.pp)

    def pipelines(self) -> list[list[int]]:
        """The global ranks along each line of the pp axis, first stage first."""
        ranks_per_stage = self.world_size // self.pp
        return [[stage * ranks_per_stage + index for stage in range(self.pp)] for index in range(ranks_per_stage)]


@dataclass(frozen=True, kw_only=True, slots=True)
class Mesh:
    """The mesh as seen by this process: its coordinate, and a process group along every axis."""

    shape: MeshShape
    """Sizes of the axes."""

    coordinate: MeshCoordinate
    """Place of this rank."""

    device_mesh: DeviceMesh
    """Axes ``pp, dp_replicate, dp_shard, cp, tp``. The dp axis is those two: replicas of the training state, and shards
    of it. ``dp_shard`` has size 1 at ZeRO stage 0, ``dp_replicate`` at the others unless sharding is hybrid."""

    dp_group: dist.ProcessGroup
    """All ranks along the dp axis."""

    replica_group: dist.ProcessGroup
    """All ranks of this rank's model replica: pp x cp x tp."""

    groups: MeshGroups
    """All groups of the mesh."""

    slices: dict[tuple[str, ...], DeviceMesh] = field(default_factory=dict, repr=False, compare=False)
    """The answers of `sliced` so far."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Mesh:
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
        """Data-parallel ranks that share the training state; each such group holds all of it."""
        return self.sliced("dp_shard").size()

    @property
    def shard_axes(self) -> DeviceMesh:
        """The mesh that FSDP2 shards over: one axis, or with hybrid sharding the two of dp."""
        is_hybrid = self.num_shards < self.shape.dp
        return self.sliced("dp_replicate", "dp_shard") if is_hybrid else self.sliced("dp_shard")

    def sliced(self, *names: str) -> DeviceMesh:
        """The mesh along axes of `device_mesh`, through this rank; made once, as it is asked for by each parameter."""
        if names not in self.slices:
            self.slices[names] = self.device_mesh[names]
        return self.slices[names]

    def axis(self, name: AxisName) -> DeviceMesh:
        """The one-dimensional mesh along an axis, through this rank; all of them share `device_mesh` as their root.
        With hybrid sharding dp is none of them: see `shard_axes` and `group`.
        """
        if name != "dp":
            return self.sliced(name)
        assert self.num_shards in (1, self.shape.dp), "hybrid sharding has two axes in place of dp"
        return self.sliced("dp_replicate" if self.num_shards == 1 else "dp_shard")

    def group(self, name: AxisName | Literal["replica"]) -> dist.ProcessGroup:
        """The process group along an axis, or of the model replica, through this rank."""
        if name == "dp":
            return self.dp_group
        return self.replica_group if name == "replica" else self.axis(name).get_group()


def resolve_mesh_shape(config: ThreeDConfig, world_size: int) -> MeshShape:
    """Fit the configured sizes to the number of processes.

    Raises:
        ConfigError: the sizes do not divide `world_size`, an explicit `data_parallel_size` does not fill it, or
            `zero.shard_size` does not divide the data-parallel ranks.

    """
    pp, cp, tp = config.pipeline_parallel_size, config.context_parallel_size, config.tensor_parallel_size
    replica_size = pp * cp * tp
    sizes = f"pipeline {pp} x context {cp} x tensor {tp} = {replica_size}"
    if world_size % replica_size != 0:
        fitting = [multiple for multiple in (world_size // replica_size, world_size // replica_size + 1) if multiple]
        numbers = " or ".join(str(multiple * replica_size) for multiple in fitting)
        raise ConfigError(
            f"world size {world_size} is not divisible by {sizes}: use {numbers} processes, or change "
            "pipeline_parallel_size, context_parallel_size or tensor_parallel_size"
        )
    dp = world_size // replica_size
    if config.data_parallel_size not in ("auto", dp):
        needed = replica_size * config.data_parallel_size
        raise ConfigError(
            f"data_parallel_size={config.data_parallel_size} x {sizes} needs {needed} processes, but the world size "
            f"is {world_size}: use {needed} processes, or data_parallel_size={dp} or 'auto'"
        )
    shard_size = config.zero.shard_size
    if shard_size != "auto" and dp % shard_size:
        sizes = ", ".join(str(size) for size in range(2, dp + 1) if dp % size == 0)
        raise ConfigError(
            f"zero.shard_size={shard_size} does not divide the {dp} data-parallel ranks:"
            f" use {f'{sizes}, or ' if sizes else ''}'auto'"
        )
    return MeshShape(pp=pp, dp=dp, cp=cp, tp=tp)


def warn_of_slow_groups(shape: MeshShape, ranks_per_node: int) -> None:
    """Warn if ranks of one tensor-parallel group are on different nodes; tp is the innermost axis."""
    if shape.world_size > ranks_per_node and ranks_per_node % shape.tp:
        rank_zero_warn(
            f"tensor_parallel_size={shape.tp} with {ranks_per_node} processes per node puts tensor-parallel groups"
            " across nodes, and each block then waits for the network several times. Use a size that divides"
            f" {ranks_per_node}."
        )


def num_sharing(shape: MeshShape, *, zero_stage: int, shard_size: int | Literal["auto"]) -> int:
    """Data-parallel ranks that share the training state; the settings are those of `build_mesh`."""
    if zero_stage == 0:
        return 1
    return shape.dp if shard_size == "auto" else shard_size


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
    dp_shard = num_sharing(shape, zero_stage=zero_stage, shard_size=shard_size)
    sizes = (shape.pp, shape.dp // dp_shard, dp_shard, shape.cp, shape.tp)
    ranks = torch.arange(shape.world_size).view(sizes)
    along = [ranks.movedim(axis, -1).flatten(0, -2).tolist() for axis in range(len(sizes))]
    made = [groups.make(sets) if len(sets[0]) > 1 else groups.make_once(sets) for sets in along]
    of_axes = [_own(group) for group in made]
    device_mesh = DeviceMesh.from_group(
        of_axes, device_type, ranks, mesh_dim_names=("pp", "dp_replicate", "dp_shard", "cp", "tp")
    )
    # Slicing an axis flattened from `device_mesh` is deprecated (torch 2.13), so the replica has a group of its own.
    # With tensor parallel alone it is that of tp, whose collectives come one after the other, too.
    is_tp_axis = shape.pp * shape.cp == 1
    replicas = [shape.replica_ranks(dp) for dp in range(shape.dp)]
    replica_group = of_axes[-1] if is_tp_axis else _own(groups.make(replicas))
    if dp_shard in (1, shape.dp):
        dp_group = device_mesh["dp_replicate" if dp_shard == 1 else "dp_shard"].get_group()
    else:
        dp_group = _own(groups.make(shape.data_parallel_ranks()))
    return Mesh(
        shape=shape,
        coordinate=shape.coordinate(dist.get_rank()),
        device_mesh=device_mesh,
        dp_group=dp_group,
        replica_group=replica_group,
        groups=groups,
    )


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
