"""Replacing a checkpoint, killed at every call of the file system: the one before or the new one is there, entirely."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lightning_3d.checkpoint import atomic

_EVENTS = ("open", "os.", "shutil.", "ctypes.call_function")
NUM_MOST = 60


def _save(path: Path, content: str, *, as_file: bool) -> None:
    atomic.prepare_staging(path)
    staged = atomic.staging_path(path)
    if as_file:
        staged.write_text(content)
    else:
        staged.mkdir()
        for name in ("a.distcp", "b.distcp"):
            (staged / name).write_text(content)
    atomic.publish(path)


def _content(path: Path) -> str | None:
    """The content of a complete checkpoint; None if there is none."""
    found = atomic.published_path(path)
    if not found.exists():
        return None
    if found.is_file():
        return found.read_text()
    contents = {(found / name).read_text() for name in ("a.distcp", "b.distcp")}
    (content,) = contents
    return content


def _killed_at(number: int, act: Callable[[], None]) -> bool:
    """Whether a process that runs this was killed at a call of the file system, or ended before it came to it."""
    child = os.fork()
    if child == 0:
        calls = 0

        def count(event: str, arguments: Any) -> None:
            nonlocal calls
            if event.startswith(_EVENTS):
                calls += 1
                if calls == number:
                    os.kill(os.getpid(), signal.SIGKILL)

        sys.addaudithook(count)
        try:
            act()
        finally:
            os._exit(0)
    _, status = os.waitpid(child, 0)
    return os.WIFSIGNALED(status)


@pytest.mark.parametrize("as_file", [True, False], ids=["file", "folder"])
@pytest.mark.parametrize("before", ["nothing", "file", "folder"])
def test_a_killed_save_leaves_a_whole_checkpoint(tmp_path: Path, before: str, as_file: bool) -> None:
    was_killed, number, outcomes = True, 0, set()
    while was_killed:
        number += 1
        path = tmp_path / str(number) / "last.ckpt"
        path.parent.mkdir()
        if before != "nothing":
            _save(path, "old", as_file=before == "file")
        was_killed = _killed_at(number, lambda path=path: _save(path, "new", as_file=as_file))
        outcomes.add(_content(path))
        shown = {file.name for file in path.parent.iterdir() if file.suffix == ".ckpt"}
        if before == "nothing":
            assert shown in (set(), {"last.ckpt"})
        else:
            assert shown <= {"last.ckpt", "last.before-replacement.ckpt"}
            newest = max((path.parent / name for name in shown), key=lambda file: file.stat().st_mtime)
            assert _content(newest) in ("old", "new"), "Lightning looks for the newest one that is called last"
        _save(path, "next", as_file=as_file)
        assert _content(path) == "next"
        assert [file.name for file in path.parent.iterdir()] == ["last.ckpt"], "nothing is left of a killed save"
        assert number < NUM_MOST
    assert number > 5
    assert outcomes == {None if before == "nothing" else "old", "new"}


def test_a_killed_removal_leaves_all_or_nothing(tmp_path: Path) -> None:
    was_killed, number = True, 0
    while was_killed:
        number += 1
        path = tmp_path / str(number) / "last.ckpt"
        path.parent.mkdir()
        _save(path, "old", as_file=False)
        was_killed = _killed_at(number, lambda path=path: atomic.remove(path))
        assert _content(path) in ("old", None)
    assert _content(path) is None
    assert number > 3


def test_a_link_is_replaced_and_what_it_points_to_stays(tmp_path: Path) -> None:
    best, last = tmp_path / "best.ckpt", tmp_path / "last.ckpt"
    _save(best, "best", as_file=False)
    last.symlink_to(best.name)
    _save(last, "new", as_file=False)
    assert (_content(best), _content(last)) == ("best", "new")
    assert not last.is_symlink()
