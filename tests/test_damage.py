"""Checkpoints that were damaged after they were written: found and named, alike on every rank, before they are used."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import pytest
import torch
import torch.distributed as dist
from torch.utils.serialization import config

from lightning_3d.checkpoint import read_folder
from lightning_3d.checkpoint.atomic import MANIFEST, META
from lightning_3d.checkpoint.checksums import Checksum, damage, manifest_of
from lightning_3d.checkpoint.content import MODEL
from lightning_3d.checkpoint.export import export_checkpoint
from lightning_3d.checkpoint.own_state import state_for_hooks
from lightning_3d.cli import main
from lightning_3d.errors import CheckpointError
from tests.checkpoints import restore, save_file, save_folder, staged
from tests.workers import WorkerPools

NOTHING = Checksum(size=0, xxh3_64="0")


def _saved(path: Path, add: float = 0.0) -> None:
    """Save a model whose values are known; a collective of all ranks."""
    model, pp = staged()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(add)
    save_folder(path, {MODEL: state_for_hooks(model), "epoch": 3}, pp)


def _tried(read: Callable[[], Any]) -> Any:
    """The error, or what was read."""
    try:
        return read()
    except CheckpointError as error:
        return str(error)


def _alike(found: Any) -> Any:
    """What all ranks found, if it is alike."""
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, found)
    assert everyone == [found] * dist.get_world_size(), everyone
    return found


def _truncate(path: Path) -> str:
    file = next(path.glob("__1_*"))
    file.write_bytes(file.read_bytes()[:-7])
    return f"{file.name} has {file.stat().st_size} bytes and had {file.stat().st_size + 7}"


def _remove(path: Path) -> str:
    (path / ".metadata").unlink()
    return ".metadata is missing"


def _take_of_another_run(path: Path) -> str:
    shutil.copy(path.with_name("other") / "__0_0.distcp", path)
    return "__0_0.distcp has another content than was written"


def _take_all_parts_of_another_run(path: Path) -> str:
    for file in path.with_name("other").glob("*.distcp"):
        shutil.copy(file, path)
    return "__0_0.distcp has another content than was written (its checksum differs); __1_0.distcp has another"


def _lose_the_manifest(path: Path) -> str:
    (path / MANIFEST).unlink()
    return f"{MANIFEST} is missing"


def _change_the_rest(path: Path) -> str:
    torch.save({"epoch": 4}, path / META)
    return f"{META} has "


HURTS = [_truncate, _remove, _take_of_another_run, _take_all_parts_of_another_run, _lose_the_manifest, _change_the_rest]


def _hurt(folder: Path) -> None:
    _saved(folder / "other", add=1.0)
    for hurt in HURTS:
        path, said = folder / "saved", [""]
        _saved(path)
        dist.barrier()
        if dist.get_rank() == 0:
            said = [hurt(path)]
        dist.broadcast_object_list(said)
        found = _alike(_tried(lambda path=path: restore(path, staged()[0])))
        assert said[0] in found, (hurt.__name__, found)
        with pytest.raises(CheckpointError) as raised:  # for load_from_checkpoint
            read_folder(path, "cpu", True)
        assert said[0] in str(raised.value)
        dist.barrier()


def test_files_that_are_not_those_of_the_checkpoint(workers: WorkerPools, tmp_path: Path) -> None:
    workers(2).run(_hurt, tmp_path)


@pytest.mark.parametrize(
    ("manifest", "problem"),
    [(manifest_of({META: NOTHING}), f"{META} is no file"), ("[" * 100_000, f"{MANIFEST} is damaged")],
)
def test_what_is_no_file_and_no_manifest(tmp_path: Path, manifest: str, problem: str) -> None:
    os.mkfifo(tmp_path / META)
    (tmp_path / MANIFEST).write_text(manifest)
    (found,) = damage(tmp_path)
    assert problem in found


def test_the_command(workers: WorkerPools, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "saved"
    workers(2).run(_saved, path)
    main(["checkpoint", "verify", str(path)])
    assert f"{path} is whole: 4 files, " in capsys.readouterr().out
    problems = [_truncate(path), _remove(path)]
    with pytest.raises(SystemExit, match="1"):
        main(["checkpoint", "verify", str(path)])
    told = capsys.readouterr().err
    assert all(problem in told for problem in problems)
    assert told.count("\n") == 1
    torch.save({}, tmp_path / "file.ckpt")
    main(["checkpoint", "verify", str(tmp_path / "file.ckpt")])
    assert "file.ckpt is whole: one file, " in capsys.readouterr().out
    torch.save({"weight": torch.zeros(1000)}, tmp_path / "flipped.ckpt")
    content = (tmp_path / "flipped.ckpt").read_bytes()
    (tmp_path / "flipped.ckpt").write_bytes(content.replace(bytes(1000), bytes(999) + b"1", 1))
    with pytest.raises(SystemExit, match="1"):
        main(["checkpoint", "verify", str(tmp_path / "flipped.ckpt")])
    assert "flipped.ckpt is damaged: its record flipped/data/0 has another content" in capsys.readouterr().err
    (tmp_path / "empty").mkdir()
    (tmp_path / "text").write_text("no checkpoint")
    reasons = {"empty": "has the file meta.pt", "text": "it is none", "none": "there is no checkpoint"}
    for name, reason in reasons.items():
        with pytest.raises(SystemExit, match="1"):
            main(["checkpoint", "verify", str(tmp_path / name)])
        assert reason in capsys.readouterr().err


def _flip_a_bit(path: Path) -> str:
    """Change a weight; returns the record that it is in."""
    with ZipFile(path) as archive:
        largest = max(archive.infolist(), key=lambda record: record.file_size)
        data = archive.read(largest)
    content = path.read_bytes()
    assert content.count(data) == 1
    path.write_bytes(content.replace(data, data[:5] + bytes([data[5] ^ 1]) + data[6:]))
    return largest.filename


def _load_flipped(folder: Path) -> None:
    model, _ = staged()
    save_file(folder / "whole.ckpt", {MODEL: state_for_hooks(model), "epoch": 3})
    said = [""]
    if dist.get_rank() == 0:
        shutil.copy(folder / "whole.ckpt", folder / "flipped.ckpt")
        said = [_flip_a_bit(folder / "flipped.ckpt")]
    dist.broadcast_object_list(said)
    assert restore(folder / "whole.ckpt", staged()[0]) == {"epoch": 3}
    found = _alike(_tried(lambda: restore(folder / "flipped.ckpt", staged()[0])))
    assert f"flipped.ckpt is damaged: its record {said[0]} has another content than was written" in found
    for read in (
        lambda: read_folder(folder / "flipped.ckpt", "cpu", True),
        lambda: export_checkpoint(folder / "flipped.ckpt", folder / f"to{dist.get_rank()}"),
    ):
        with pytest.raises(CheckpointError, match="is damaged: its record"):
            read()


def test_a_file_with_a_flipped_bit(workers: WorkerPools, tmp_path: Path) -> None:
    workers(2).run(_load_flipped, tmp_path)


def test_a_file_without_checksums_and_one_of_an_old_torch(tmp_path: Path) -> None:
    with config.patch("save.compute_crc32", False):
        torch.save({"weight": torch.ones(9)}, tmp_path / "without.ckpt")
    torch.save({"weight": torch.ones(9)}, tmp_path / "old.ckpt", _use_new_zipfile_serialization=False)
    assert damage(tmp_path / "without.ckpt") == damage(tmp_path / "old.ckpt") == []
