"""The mesh: sizes against the world size, coordinates, groups across nodes and the threads of gloo's groups."""

from __future__ import annotations

import itertools
import re
import warnings
from contextlib import nullcontext
from functools import partial
from math import prod
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_3d.config.settings import ThreeDConfig
from lightning_3d.distributed.axes import AXES, ROLES
from lightning_3d.distributed.mesh import MeshShape, build_mesh, resolve_mesh_shape, warn_of_slow_groups
from lightning_3d.errors import ConfigError
from lightning_3d.torch_internals.process_groups import num_gloo_threads, one_gloo_thread
from tests.workers import WorkerPools

NEEDS = "pipeline 2 x context 1 x tensor 2 = 4"


@pytest.mark.parametrize(
    ("settings", "world_size", "message"),
    [
        ({}, 6, f"world size 6 is not divisible by {NEEDS}: use 4 or 8 processes, or"),
        ({}, 2, f"world size 2 is not divisible by {NEEDS}: use 4 processes, or"),
        (
            {"data_parallel_size": 3},
            8,
            f"data_parallel_size=3 x {NEEDS} needs 12 processes, but the world size is 8: use 12 processes, or"
            " data_parallel_size=2 or 'auto'",
        ),
        ({"data_parallel_size": 2}, 6, "world size 6 is not divisible by"),
        (
            {"zero": {"shard_size": 4}, "pipeline_parallel_size": 1, "tensor_parallel_size": 1},
            6,
            "zero.shard_size=4 does not divide the 6 ranks that hold the same weights: use 2, 3, 6, or 'auto'",
        ),
    ],
)
def test_sizes_that_do_not_fill_the_world(settings: dict[str, Any], world_size: int, message: str) -> None:
    config = ThreeDConfig.from_mapping({"pipeline_parallel_size": 2, "tensor_parallel_size": 2, **settings})
    with pytest.raises(ConfigError, match=re.escape(message)):
        resolve_mesh_shape(config, world_size)


SHAPES = st.builds(MeshShape, **dict.fromkeys(("pp", "dp", "cp", "tp"), st.integers(1, 4)))


@settings(deadline=None)
@given(SHAPES)
def test_ranks_have_coordinates_with_tp_innermost_and_pp_outermost(shape: MeshShape) -> None:
    coordinates = [shape.coordinate(rank) for rank in range(shape.world_size)]
    expected = itertools.product(*(range(size) for size in (shape.pp, shape.dp, shape.cp, shape.tp)))
    assert [(at.pp, at.dp, at.cp, at.tp) for at in coordinates] == [*expected]
    for dp in range(shape.dp):
        assert shape.replica_ranks(dp) == [rank for rank, at in enumerate(coordinates) if at.dp == dp]


@given(SHAPES)
def test_ranks_along_axes_differ_along_them_alone(shape: MeshShape) -> None:
    for names in (("pp",), ("cp", "tp"), *ROLES.values()):
        sets = shape.ranks_along(names)
        assert sorted(rank for ranks in sets for rank in ranks) == list(range(shape.world_size))
        for ranks in sets:
            coordinates = [shape.coordinate(rank) for rank in ranks]
            same = {tuple(getattr(at, axis.name) for axis in AXES if axis.name not in names) for at in coordinates}
            assert len(same) == 1
            assert len(ranks) == prod(shape.sizes[name] for name in names)


def _roles(shape: MeshShape) -> dict[str, list[int]]:
    mesh = build_mesh(shape, zero_stage=1, device_type="cpu")
    return {role: dist.get_process_group_ranks(mesh.group(role)) for role in ROLES}


def test_groups_of_roles_with_context_parallel(workers: WorkerPools) -> None:
    """Its ranks share the state with replicas, and the batch with the other ranks of theirs."""
    assert workers(4).run(_roles, MeshShape(pp=1, dp=2, cp=2, tp=1)) == [
        {"state": [0, 1, 2, 3], "samples": [rank % 2, rank % 2 + 2], "replica": [rank - rank % 2, rank - rank % 2 + 1]}
        for rank in range(4)
    ]
    assert workers(4).run(_roles, MeshShape(pp=2, dp=1, cp=2, tp=1)) == [
        {"state": [rank - rank % 2, rank - rank % 2 + 1], "samples": [rank], "replica": [0, 1, 2, 3]}
        for rank in range(4)
    ]


def test_tensor_parallel_groups_across_nodes_warn() -> None:
    for tp, ranks_per_node in ((4, 2), (8, 4), (2, 3)):
        with pytest.warns(UserWarning, match=f"tensor_parallel_size={tp} with {ranks_per_node} processes per node"):
            warn_of_slow_groups(MeshShape(pp=1, dp=3, cp=1, tp=tp), ranks_per_node)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_of_slow_groups(MeshShape(pp=1, dp=4, cp=1, tp=4), 8)
        warn_of_slow_groups(MeshShape(pp=1, dp=1, cp=1, tp=4), 4)


def _threads_of_groups(
    shape: MeshShape, shard_size: int | Literal["auto"], *, are_users: bool
) -> tuple[bool, set[int]]:
    """Whether a mesh has the default group, and how many threads its groups have.

    Args:
        are_users: Whether the default group is as users make it.
    """
    rank, store = dist.get_rank(), dist.FileStore(str(Path("store").resolve()), shape.world_size)  # type: ignore[attr-defined]
    dist.destroy_process_group()
    with nullcontext() if are_users else one_gloo_thread():
        dist.init_process_group("gloo", store=store, rank=rank, world_size=shape.world_size)
    mesh = build_mesh(shape, zero_stage=3, device_type="cpu", shard_size=shard_size)
    groups = [mesh.device_mesh.get_group(name) for name in mesh.device_mesh.mesh_dim_names or ()]
    groups += [*mesh.roles.values()]
    first = mesh.groups.make_once([[rank] for rank in range(shape.world_size)])
    assert first is not None
    for group in groups:
        total = torch.ones(1)
        dist.all_reduce(total, group=group)
        assert int(total) == group.size()
    return dist.group.WORLD in groups, {num_gloo_threads(group, "cpu") for group in (*groups, first)}


@pytest.mark.parametrize("are_users", [False, True])
@pytest.mark.parametrize(
    ("shape", "shard_size"),
    [
        (MeshShape(pp=2, dp=1, cp=1, tp=1), "auto"),
        (MeshShape(pp=1, dp=4, cp=1, tp=1), 2),
    ],
)
def test_gloo_runs_the_groups_of_a_mesh_in_one_thread(
    workers: WorkerPools, shape: MeshShape, shard_size: int | Literal["auto"], are_users: bool
) -> None:
    """Two threads of a gloo group write to the same memory: processes crashed in or after gathers of DTensors."""
    pool = workers(shape.world_size)
    try:
        assert (
            pool.run(partial(_threads_of_groups, are_users=are_users), shape, shard_size)
            == [(not are_users, {1})] * shape.world_size
        )
    finally:
        pool.close()  # the store of the default group goes with the folder of the run


def _num_loops() -> int:
    """The number of threads that look at the sockets of gloo's devices."""
    return [path.read_text().strip() for path in Path("/proc/self/task").glob("*/comm")].count("gloo_tcp_loop")


def _loops_of_further_groups(shape: MeshShape) -> int:
    before = _num_loops()
    build_mesh(shape, zero_stage=1, device_type="cpu", shard_size="auto")
    return _num_loops() - before


def test_groups_share_the_devices_of_gloo(workers: WorkerPools) -> None:
    """Each device has a thread that wakes a hundred times a second."""
    assert all(number > 0 for number in workers(2).run(_num_loops))
    assert workers(2).run(_loops_of_further_groups, MeshShape(pp=2, dp=1, cp=1, tp=1)) == [0, 0]
