"""A checkpoint, folder or file, exists entirely or not at all: it is written aside, and takes its place by renames.

    .last.ckpt.saving/              being written, on the same file system; then synced, and renamed to last.ckpt
    last.before-replacement.ckpt/   a folder that was there, for that moment
    .last.ckpt.saving/              it again, until it is removed

What a killed save leaves aside is found by nobody who looks for checkpoints, and removed by the next save to that path.
If the process is killed between the renames, ``completed`` finds the folder before, and so does Lightning for
``ckpt_path="last"`` and ``"hpc"``. A file takes the place of a file or link in one rename.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_LONGEST = 200  # bytes of a name, to which others are added; systems take 255


def local_path(path: str | os.PathLike[str]) -> Path | None:
    """The path on this machine's file systems; None for a URL of another that ``fsspec`` knows."""
    scheme, separator, rest = os.fspath(path).partition("://")
    if not separator:
        return Path(path)
    return Path(rest) if scheme in ("file", "local") else None


def aside(path: Path) -> Path:
    """Where a checkpoint is written that goes to this path."""
    name = path.name.replace("ckpt_", "ckpt%5F")  # Lightning takes names with `hpc_ckpt_` for such checkpoints
    return path.with_name(f".{_shortened(name)}.saving")


def completed(path: Path) -> Path:
    """Where the checkpoint of this path is: there, or where a killed save had moved it."""
    before = _before(path)
    return before if not os.path.lexists(path) and before.exists() else path


@contextmanager
def replacing(path: Path, is_own: Callable[[Path], bool]) -> Iterator[Path]:
    """Write a checkpoint aside, which then takes its place; after a failure what was there stays.

    Args:
        path: The path of the checkpoint.
        is_own: As in ``make_room``.

    Yields:
        Where it is written.
    """
    make_room(path, is_own)
    try:
        yield aside(path)
        publish(path, is_own)
    except BaseException:
        give_up(path)
        raise


def make_room(path: Path, is_own: Callable[[Path], bool]) -> None:
    """Let there be nothing where a checkpoint is written that goes to this path, and a folder to write it in.

    Args:
        is_own: Whether a file in the folder of a checkpoint is a part of it; others, of one that was to be removed, go
            back to the path.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    if completed(path) != path:  # half of a replacement
        _before(path).rename(path)
    _remove(aside(path), keep_in=path, is_own=is_own)
    if os.path.lexists(_before(path)):
        _before(path).rename(aside(path))  # out of sight, as half of it might be found
        _remove(aside(path), keep_in=path, is_own=is_own)


def give_up(path: Path) -> None:
    """Remove what was written aside for this path, as it can't be finished."""
    with suppress(OSError):
        _remove(aside(path))


def publish(path: Path, is_own: Callable[[Path], bool]) -> None:
    """Let what was written aside take its place, and remove what was there.

    Args:
        path: The path of the checkpoint.
        is_own: As in ``make_room``.
    """
    staged = aside(path)
    _sync_below(staged)
    if not _is_folder(path) and (not _is_folder(staged) or not os.path.lexists(path)):
        staged.replace(path)
    else:
        path.rename(_before(path))
        staged.rename(path)
        _before(path).rename(staged)
    _sync(path.parent)
    _remove(staged, keep_in=path, is_own=is_own)


def remove(path: Path) -> None:
    """Remove a checkpoint; killed in between, it is gone for those who look for it."""
    gone = aside(path)
    _remove(gone)
    path.rename(gone)
    _remove(gone)


def _before(path: Path) -> Path:
    stem = _shortened(path.name).removesuffix(path.suffix)
    return path.with_name(f"{stem}.before-replacement{path.suffix}")


def _shortened(name: str) -> str:
    """A name, or a digest of it that leaves room for additions."""
    encoded = os.fsencode(name)
    return name if len(encoded) <= _LONGEST else hashlib.sha256(encoded).hexdigest()


def _is_folder(path: Path) -> bool:
    return path.is_dir() and not path.is_symlink()


def _remove(path: Path, *, keep_in: Path | None = None, is_own: Callable[[Path], bool] = lambda file: True) -> None:
    """Remove a file, link or folder, if it is there; files of others in a folder move to another."""
    if path.is_symlink() or path.is_file():
        path.unlink()
    elif path.is_dir():
        if keep_in is not None and keep_in.is_dir():
            for file in _others(path, is_own):
                file.rename(keep_in / file.name)
        shutil.rmtree(path)


def _others(folder: Path, is_own: Callable[[Path], bool]) -> Collection[Path]:
    return [file for file in folder.iterdir() if not is_own(file)]


def _sync_below(path: Path) -> None:
    """Have the system write a file, or a folder and all that is in it, to its disk."""
    if path.is_symlink():  # a name like others in its folder
        return
    for inner in path.iterdir() if path.is_dir() else ():
        _sync_below(inner)
    _sync(path)


def _sync(path: Path) -> None:
    """Have the system write a file, or the names in a folder, to its disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
