"""Process groups, files and threads after runs: later runs have the mesh of one alike."""

from __future__ import annotations

import gc
import time
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from lightning_3d.distributed.mesh import Mesh, MeshShape, shared_mesh
from tests.models import TinyGPT, loader, tokens
from tests.parity import Layout, fitted, whole_state
from tests.workers import WorkerPools

LAYOUTS = {"dp2": Layout(dp=2), "zero3": Layout(dp=2, zero=3), "pp2": Layout(pp=2, zero=2), "tp2": Layout(tp=2)}
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


def test_further_fits_leave_nothing_more(workers: WorkerPools) -> None:
    for first, *others in workers(2).run(_after_each, ["pp2", "pp2", "pp2"]):
        assert first.groups <= 4, "the default one, that of each rank alone, and two of both ranks"
        assert all(later <= first for later in others)


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


def test_trainers_that_are_kept_share_the_mesh_of_their_layout_and_go_on(workers: WorkerPools) -> None:
    for left, same in workers(2).run(_kept, ["tp2", "tp2", "tp2"]):
        assert all(same)
        assert {now.groups for now in left} == {left[0].groups}
        assert {now.threads for now in left} == {left[0].threads}


# -------------------------------------------------------------------------------------------------------------- meshes


def _make(shape: MeshShape, timeout: float = 30) -> Mesh:
    return shared_mesh(shape, device_type="cpu", zero_stage=1, shard_size="auto", timeout=timedelta(seconds=timeout))


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
