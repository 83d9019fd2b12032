"""Process groups, files and threads after runs: later runs share those that they need, and destroy the others."""

from __future__ import annotations

import gc
import os
import time
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Replicate, Shard

from lightning_3d.distributed.groups import GroupPool, MeshGroups
from lightning_3d.distributed.mesh import AxisName, Mesh, MeshShape, build_mesh, forget_meshes, shared_mesh
from lightning_3d.torch_internals.process_groups import num_gloo_threads
from tests.models import TinyGPT, loader, tokens
from tests.parity import Layout, fitted, whole_state
from tests.workers import WorkerPools

LAYOUTS = {
    "dp2": Layout(dp=2),
    "zero3": Layout(dp=2, zero=3),
    "pp2": Layout(pp=2, zero=2),
    "tp2": Layout(tp=2),
    "pp2-zero0": Layout(pp=2, zero=0),
}
_model = partial(TinyGPT, num_layers=2)


@pytest.fixture(autouse=True)
def _without_groups_of_other_tests(workers: WorkerPools) -> None:
    workers(2).close()


@dataclass(frozen=True, kw_only=True)
class Left:
    """What a process has open."""

    groups: int
    files: int
    threads: int

    @classmethod
    def now(cls) -> Left:
        gc.collect()
        time.sleep(0.1)  # threads of groups that were destroyed end
        groups = len(dist.distributed_c10d._world.pg_map) if dist.is_initialized() else 0
        files, threads = (len(list(Path("/proc/self", name).iterdir())) for name in ("fd", "task"))
        return cls(groups=groups, files=files, threads=threads)

    def __le__(self, other: Left) -> bool:
        return self.groups <= other.groups and self.files <= other.files and self.threads <= other.threads


def _after_each(names: list[str]) -> list[Left]:
    left = []
    for name in names:
        fitted(LAYOUTS[name], _model, batches=2, epochs=1)
        left.append(Left.now())
    return left


TURNS = [
    ["pp2", "tp2"] * 3,
    ["pp2", "dp2", "zero3", "tp2", "pp2-zero0", "pp2"],
]


@pytest.mark.parametrize("names", TURNS, ids="-".join)
def test_further_fits_leave_nothing_more(workers: WorkerPools, names: list[str]) -> None:
    for left in workers(2).run(_after_each, names):
        assert left[0].groups <= 4, "the default one, that of each rank alone, and two of both ranks"
        assert all(later <= left[0] for later in left[1:])


def _uncollected(name: str) -> list[int]:
    """Open files after each of some fits whose Trainers, which refer to themselves, are not collected."""
    dist.destroy_process_group()  # the tests' own has a file as its store, the strategy's a server with sockets
    gc.disable()
    try:
        return [len(os.listdir("/proc/self/fd")) for _ in range(4) if fitted(LAYOUTS[name], _model, batches=1)]
    finally:
        gc.enable()


@pytest.mark.parametrize("name", ["dp2", "pp2"])
def test_fits_that_are_not_collected_keep_no_sockets(workers: WorkerPools, name: str) -> None:
    for _, second, *_, last in workers(2).run(_uncollected, name):
        assert last <= second
    workers(2).close()


def _kept(names: list[str]) -> tuple[list[Left], list[bool]]:
    """All Trainers are kept, and used at the end."""
    left, runs, trained = [], [], []
    for name in names:
        trainer, module = fitted(LAYOUTS[name], _model, batches=2, epochs=1)
        runs.append((trainer, module))
        trained.append(whole_state(trainer))
        left.append(Left.now())
    same = []
    for name, (trainer, module), state in zip(names, runs, trained, strict=True):
        again = whole_state(trainer)
        same.append(all(torch.equal(value, again[fqn]) for fqn, value in state.items()))
        trainer.save_checkpoint(f"{name}.ckpt")
        trainer.validate(module, loader(tokens(8), global_batch_size=8, data_parallel_size=LAYOUTS[name].dp))
    return left, same


def test_trainers_that_are_kept_share_groups_and_go_on(workers: WorkerPools) -> None:
    for left, same in workers(2).run(_kept, ["pp2", "tp2", "zero3", "dp2", "pp2-zero0"]):
        assert all(same)
        assert {now.groups for now in left} == {left[0].groups}
        assert {now.threads for now in left} == {left[0].threads}


class _Fails(L.Callback):
    """Fails on all ranks, with steps behind it."""

    def on_train_batch_end(self, *_: object) -> None:
        raise ValueError("enough")


def _after_failures(name: str) -> list[Left]:
    left = []
    for _ in range(3):
        with pytest.raises(ValueError, match="enough"):
            fitted(LAYOUTS[name], _model, batches=2, epochs=1, callbacks=[_Fails()])
        fitted(LAYOUTS[name], _model, batches=2, epochs=1)
        left.append(Left.now())
    return left


@pytest.mark.parametrize("name", ["pp2", "tp2"])
def test_runs_that_fail_leave_nothing_more(workers: WorkerPools, name: str) -> None:
    for left in workers(2).run(_after_failures, name):
        assert all(later <= left[0] for later in left[1:])


def _with_another_default() -> list[int]:
    found = []
    for _ in range(2):
        fitted(LAYOUTS["pp2"], _model, batches=2, epochs=1)
        found.append(Left.now().groups)
        dist.barrier()
        dist.destroy_process_group()
        rank, store = int(os.environ["RANK"]), dist.FileStore(str(Path("store").resolve()) + str(len(found)), 2)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    return found


def test_groups_that_users_destroy_with_the_default_one_are_made_anew(workers: WorkerPools) -> None:
    # gloo runs that of the user in two threads, so that no mesh takes it
    assert workers(2).run(_with_another_default) == [[4, 5]] * 2
    workers(2).close()  # the store of the last default group goes with the folder of the run


def _made_by_the_strategy() -> int:
    dist.destroy_process_group()
    fitted(LAYOUTS["zero3"], _model, batches=2, epochs=1)
    assert dist.group.WORLD is not None
    return num_gloo_threads(dist.group.WORLD, "cpu")


def test_the_default_group_of_the_strategy_is_one_that_meshes_take(workers: WorkerPools) -> None:
    assert workers(2).run(_made_by_the_strategy) == [1, 1]
    workers(2).close()


# -------------------------------------------------------------------------------------------------------------- meshes


def _members(mesh_shape: MeshShape, pool: GroupPool) -> tuple[list[str], Mesh]:
    mesh = build_mesh(mesh_shape, zero_stage=0, device_type="cpu", groups=MeshGroups(pool))
    names: tuple[AxisName, ...] = ("pp", "dp", "cp", "tp")
    axes = [mesh.axis(name).get_group() for name in names]
    return [group.group_name for group in (*axes, mesh.group("replica"))], mesh


def _shared_by_ranks() -> tuple[list[str], list[str], bool]:
    pool = GroupPool()
    pipeline, first = _members(MeshShape(pp=2, dp=1, cp=1, tp=1), pool)
    tensor, second = _members(MeshShape(pp=1, dp=1, cp=1, tp=2), pool)
    totals = [torch.ones(1) for _ in range(2)]
    for mesh, total in zip((first, second), totals, strict=True):
        dist.all_reduce(total, group=mesh.group("replica"))
    return pipeline, tensor, all(float(total) == 2 for total in totals)


def test_meshes_share_the_groups_of_the_same_ranks(workers: WorkerPools) -> None:
    for pipeline, tensor, is_summed in workers(2).run(_shared_by_ranks):
        pp, alone, *others, replica = pipeline
        assert others == [alone, alone]
        assert len({pp, alone, replica}) == 3, "axes of one mesh have groups of their own"
        assert tensor == [alone, alone, alone, pp, pp], "a replica of tensor parallel alone has the group of its axis"
        assert is_summed


def _make(shape: MeshShape, timeout: float = 30) -> Mesh:
    return shared_mesh(shape, device_type="cpu", zero_stage=1, shard_size="auto", timeout=timedelta(seconds=timeout))


def _one_rank_keeps(holds: list[bool]) -> list[int]:
    """The groups after a mesh that only some ranks hold."""
    rank, found = dist.get_rank(), []
    kept: Mesh | None = _make(MeshShape(pp=2, dp=1, cp=1, tp=1))
    if not holds[rank]:
        kept = None
    _make(MeshShape(pp=1, dp=2, cp=1, tp=1))
    found.append(Left.now().groups)
    del kept
    _make(MeshShape(pp=1, dp=2, cp=1, tp=1))
    found.append(Left.now().groups)
    return found


@pytest.mark.parametrize("holds", [[True, True], [True, False], [False, True], [False, False]])
def test_groups_stay_while_any_rank_needs_them(workers: WorkerPools, holds: list[bool]) -> None:
    workers(2).close()  # processes without groups
    assert workers(2).run(_one_rank_keeps, holds) == [[3 if any(holds) else 2, 2]] * 2


def _tensor_alone() -> list[list[bool]]:
    """Whether groups count as used, with a mesh, then with a DTensor of it alone, then without."""
    pool, found = GroupPool(), []
    groups = MeshGroups(pool)
    groups.take([range(2)])  # so that the axis has another one than the default one
    mesh = build_mesh(MeshShape(pp=1, dp=1, cp=1, tp=2), zero_stage=0, device_type="cpu", groups=groups)
    tensor = DTensor.from_local(torch.ones(2), mesh.axis("tp"), [Shard(0)])
    found.append([is_used for is_used, _ in pool.states(None)])
    del mesh, groups
    assert (2 * tensor).redistribute(placements=[Replicate()]).to_local().tolist() == [2.0] * 4
    found.append([is_used for is_used, _ in pool.states(None)])
    assert float(tensor.sum().full_tensor()) == 4
    del tensor
    found.append([is_used for is_used, _ in pool.states(None)])
    return found


def test_tensors_keep_the_groups_of_their_mesh(workers: WorkerPools) -> None:
    kinds = 2  # of one rank, the axis
    assert workers(2).run(_tensor_alone) == [[[True] * kinds, [True] * kinds, [False] * kinds]] * 2


def _interrupted() -> float:
    """One rank is interrupted while it makes groups, and then all make others."""
    kept = _make(MeshShape(pp=1, dp=2, cp=1, tp=1))
    make, calls = dist.new_subgroups_by_enumeration, []

    def interrupted(*args: Any, **kwargs: Any) -> Any:
        made = make(*args, **kwargs)
        calls.append(made)
        if dist.get_rank() == 1:
            raise KeyboardInterrupt
        return made

    with pytest.MonkeyPatch.context() as patch, suppress(KeyboardInterrupt):
        patch.setattr(dist, "new_subgroups_by_enumeration", interrupted)
        kept = _make(MeshShape(pp=2, dp=1, cp=1, tp=1))
    assert calls
    if dist.get_rank() == 1:
        forget_meshes()
    mesh = _make(MeshShape(pp=1, dp=1, cp=1, tp=2))
    assert mesh is not kept
    total = torch.ones(1)
    dist.all_reduce(total, group=mesh.group("replica"))
    return float(total)


def test_a_rank_that_was_interrupted_has_the_groups_of_the_others_again(workers: WorkerPools) -> None:
    assert workers(2).run(_interrupted) == [2.0, 2.0]


def _timed_out() -> bool:
    mesh = _make(MeshShape(pp=2, dp=1, cp=1, tp=1), timeout=1)
    if dist.get_rank() == 1:
        time.sleep(4)
        return True
    began = time.monotonic()
    with pytest.raises(RuntimeError, match=r"(?i)timed? ?out"):
        dist.all_reduce(torch.ones(1), group=mesh.group("replica"))
    return time.monotonic() - began < 3


def test_the_timeout_of_the_strategy_is_that_of_all_groups(workers: WorkerPools) -> None:
    assert all(workers(2).run(_timed_out))
    workers(2).close()
