"""Checkpoints that would run code when they are loaded: every file of them, in every way of loading."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict_saver import save

from lightning_3d.checkpoint.atomic import MANIFEST
from lightning_3d.checkpoint.checksums import Checksum, manifest_of
from tests.models import TinyMLP, features, loader
from tests.parity import QUIET, Layout
from tests.workers import WorkerPools


class Malicious:
    """Makes a file when it is unpickled."""

    def __reduce__(self) -> Any:
        return os.system, ("touch ran",)


def _index(path: Path) -> None:
    (path / ".metadata").write_bytes(pickle.dumps(Malicious()))


def _index_inside(path: Path) -> None:
    """An index that is right, but for one entry."""
    index = pickle.loads((path / ".metadata").read_bytes())
    index.planner_data["more"] = Malicious()
    (path / ".metadata").write_bytes(pickle.dumps(index))


def _elsewhere(path: Path) -> None:
    """An index that names a file outside of the folder."""
    index = pickle.loads((path / ".metadata").read_bytes())
    for stored in index.storage_data.values():
        stored.relative_path = f"../{stored.relative_path}"
    (path / ".metadata").write_bytes(pickle.dumps(index))


def _rest(path: Path) -> None:
    rest = torch.load(path / "meta.pt", weights_only=False)
    torch.save({**rest, "more": Malicious()}, path / "meta.pt")


def _value(path: Path) -> None:
    """A value that is no tensor, among the parameter groups."""
    module = TinyMLP()
    state = {"state_dict": module.state_dict(), "optimizer_0": {"state": {}, "param_groups": [{"lr": Malicious()}]}}
    save(state, checkpoint_id=path, no_dist=True)


def _file(path: Path) -> None:
    checkpoint = torch.load(path, weights_only=False)
    torch.save({**checkpoint, "more": Malicious()}, path)


def _sign(path: Path) -> None:
    """Let the manifest of a folder be that of what is there, so that the change looks like no damage."""
    if path.is_dir():
        files = {file.name: Checksum.of_file(file) for file in path.iterdir() if file.name != MANIFEST}
        (path / MANIFEST).write_text(manifest_of(files))


def _trainer(layout: Layout) -> L.Trainer:
    strategy = layout.strategy()
    settings = {**QUIET, "enable_checkpointing": False}
    return L.Trainer(strategy=strategy, devices=layout.world_size, max_epochs=1, **settings)


def _data(layout: Layout) -> Any:
    return loader(features(8), global_batch_size=4, data_parallel_size=layout.dp)


def _load_everywhere(layout: Layout, changes: list[Callable[[Path], None]]) -> list[list[str]]:
    """Of each change, the errors of every way to load a checkpoint that was changed."""
    path, trainer = Path("saved.ckpt"), _trainer(layout)
    trainer.fit(TinyMLP(), _data(layout))
    ways: dict[str, Callable[[], Any]] = {
        "fit": lambda: _trainer(layout).fit(TinyMLP(), _data(layout), ckpt_path=path),
        "validate": lambda: _trainer(layout).validate(TinyMLP(), _data(layout), ckpt_path=path, verbose=False),
        "load_from_checkpoint": lambda: TinyMLP.load_from_checkpoint(path),
    }
    said: list[list[str]] = []
    for change in changes:
        trainer.save_checkpoint(path)
        if dist.get_rank() == 0:
            change(path)
            _sign(path)
        dist.barrier()
        said.append([])
        for name, load in ways.items():
            try:
                load()
                said[-1].append(f"{name}: loaded")
            except Exception as error:
                said[-1].append(f"{name}: {type(error).__name__}: {error}")
            dist.barrier()
            assert not Path("ran").exists(), (change.__name__, name)
    return said


@pytest.mark.parametrize(
    ("layout", "changes"),
    [
        (Layout(pp=2, save_distributed_checkpoint=True), [_index, _index_inside, _elsewhere, _rest, _value]),
        (Layout(dp=2), [_file]),
    ],
    ids=["folder", "file"],
)
def test_a_checkpoint_runs_no_code(workers: WorkerPools, layout: Layout, changes: list[Callable[[Path], None]]) -> None:
    first, second = workers(2).run(_load_everywhere, layout, changes)
    assert first == second
    for change, said in zip(changes, first, strict=True):
        loaded = [way for way in said if way.endswith(": loaded")]
        assert loaded == (["load_from_checkpoint: loaded"] if change is _value else []), said  # it reads no optimizers
