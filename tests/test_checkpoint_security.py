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

from lightning_3d.checkpoint.manifest import MANIFEST, Checksum, manifest_of
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


FOLDERS: dict[str, Callable[[Path], None]] = {
    "index": _index,
    "entry of the index": _index_inside,
    "file elsewhere": _elsewhere,
    "rest": _rest,
    "value": _value,
}


def _trainer(layout: Layout) -> L.Trainer:
    strategy = layout.strategy()
    settings = {**QUIET, "enable_checkpointing": False}
    return L.Trainer(strategy=strategy, devices=layout.world_size, max_epochs=1, **settings)


def _data(layout: Layout) -> Any:
    return loader(features(8), global_batch_size=4, data_parallel_size=layout.dp)


def _load_everywhere(layout: Layout, change: Callable[[Path], None]) -> list[str]:
    """The errors of every way to load a checkpoint that was changed."""
    path, trainer = Path("saved.ckpt"), _trainer(layout)
    trainer.fit(TinyMLP(), _data(layout))
    trainer.save_checkpoint(path)
    if dist.get_rank() == 0:
        change(path)
        _sign(path)
    dist.barrier()
    ways: dict[str, Callable[[], Any]] = {
        "fit": lambda: _trainer(layout).fit(TinyMLP(), _data(layout), ckpt_path=path),
        "validate": lambda: _trainer(layout).validate(TinyMLP(), _data(layout), ckpt_path=path, verbose=False),
        "load_from_checkpoint": lambda: TinyMLP.load_from_checkpoint(path),
    }
    said = []
    for name, load in ways.items():
        try:
            load()
            said.append(f"{name}: loaded")
        except Exception as error:
            said.append(f"{name}: {type(error).__name__}: {error}")
        dist.barrier()
        assert not Path("ran").exists(), name
    return said


@pytest.mark.parametrize("name", FOLDERS)
def test_a_folder_runs_no_code(workers: WorkerPools, name: str) -> None:
    layout = Layout(pp=2, save_distributed_checkpoint=True)
    first, second = workers(2).run(_load_everywhere, layout, FOLDERS[name])
    assert first == second
    refused = [said for said in first if not said.endswith(": loaded")]
    assert len(refused) == (2 if name == "value" else 3), first  # load_from_checkpoint reads no optimizers


def test_a_file_runs_no_code(workers: WorkerPools) -> None:
    for said in workers(2).run(_load_everywhere, Layout(dp=2), _file):
        assert not [way for way in said if way.endswith(": loaded")]
