"""A checkpoint, folder or file, exists entirely or not at all: it is written aside, and takes its place by renames.

    .last.ckpt.saving/              being written, on the same file system; then synced, and renamed to last.ckpt
    last.before-replacement.ckpt/   a folder that was there, for that moment
    .last.ckpt.saving/              it again, until it is removed

What a killed save leaves aside is found by nobody who looks for checkpoints, and removed by the next save to that path.
If the process is killed between the renames, ``published_path`` finds the folder before, and so does Lightning for
``ckpt_path="last"`` and ``"hpc"``. A file takes the place of a file or link in one rename.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from lightning_3d.errors import CheckpointError

META = "meta.pt"
"""File with everything that is not a state of the model or an optimizer."""

MANIFEST = "manifest.json"
"""File with the sizes and checksums of the others. Folders that Lightning wrote have none."""


NOT_SHARED = (
    "the ranks' file systems differ, and all of them must share the one of a checkpoint. Save to a path that all nodes"
    " share, or have rank 0 write files (save_distributed_checkpoint=False)"
)
"""Why a rank does not find what another has written, and the way on."""


def local_path(path: str | os.PathLike[str]) -> Path | None:
    """The path on this machine's file systems; None for a URL of another that ``fsspec`` knows."""
    scheme, separator, metadata = os.fspath(path).partition("://")
    if not separator:
        return Path(path)
    return Path(metadata) if scheme in ("file", "local") else None


def is_own(file: Path) -> bool:
    """Whether a file in the folder of a checkpoint is a part of it."""
    return file.name in (META, MANIFEST, ".metadata") or file.suffix == ".distcp"


def is_exported(file: Path) -> bool:
    """Whether a file in a folder of safetensors is a part of the export."""
    return file.name.startswith("model") and file.name.endswith((".safetensors", ".safetensors.index.json"))


def check_no_others(path: Path) -> None:
    """Raise where a file is to take the place of a checkpoint folder that has files of others.

    Raises:
        CheckpointError: It has.

    """
    if others := sorted(file.name for file in path.iterdir() if not is_own(file)) if path.is_dir() else ():
        raise CheckpointError(
            f"{path} is a checkpoint folder, and a file is to take its place, but it holds {len(others)} files that are"
            f" no part of the checkpoint ({', '.join(others[:3])}). Move them away, or write to another path"
        )


def staging_path(path: Path) -> Path:
    """Where a checkpoint is written that goes to this path."""
    name = path.name.replace("ckpt_", "ckpt%5F")  # Lightning takes names with `hpc_ckpt_` for such checkpoints
    return path.with_name(f".{name}.saving")


def published_path(path: Path) -> Path:
    """Where the checkpoint of this path is: there, or where a killed save had moved it."""
    before = _before(path)
    return before if not os.path.lexists(path) and before.exists() else path


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Write a checkpoint aside, at what this yields; then it takes its place. After a failure what was there stays."""
    prepare_staging(path)
    try:
        yield staging_path(path)
        publish(path)
    except BaseException:
        discard_staging(path)
        raise


def is_seen(path: Path) -> bool:
    """Whether this rank sees a name that another has made just now."""
    with suppress(OSError):
        os.close(os.open(path.parent, os.O_RDONLY))  # a network's file system asks its server for the names again
    return path.exists()


def prepare_staging(path: Path) -> None:
    """Let there be nothing where a checkpoint is written that goes to this path, and a folder to write it in.

    Files of others in one that was to be removed go back to the path.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    if published_path(path) != path:  # half of a replacement
        _before(path).rename(path)
    _remove(staging_path(path), keep_in=path)
    if os.path.lexists(_before(path)):
        _before(path).rename(staging_path(path))  # out of sight, as half of it might be found
        _remove(staging_path(path), keep_in=path)


def discard_staging(path: Path) -> None:
    """Remove what was written aside for this path, as it can't be finished."""
    with suppress(OSError):
        _remove(staging_path(path))


def publish(path: Path) -> None:
    """Let what was written aside take its place, and remove what was there."""
    staged = staging_path(path)
    _sync_below(staged)
    if not _is_folder(path) and (not _is_folder(staged) or not os.path.lexists(path)):
        staged.replace(path)
    else:
        path.rename(_before(path))
        staged.rename(path)
        _before(path).rename(staged)
    _sync(path.parent)
    _remove(staged, keep_in=path)


def remove(path: Path) -> None:
    """Remove a checkpoint; killed in between, it is gone for those who look for it."""
    gone = staging_path(path)
    _remove(gone)
    path.rename(gone)
    _remove(gone)


def _before(path: Path) -> Path:
    return path.with_name(f"{path.stem}.before-replacement{path.suffix}")


def _is_folder(path: Path) -> bool:
    return path.is_dir() and not path.is_symlink()


def _remove(path: Path, *, keep_in: Path | None = None) -> None:
    """Remove a file, link or folder, if it is there; files of others in a folder move to another."""
    if path.is_symlink() or path.is_file():
        path.unlink()
    elif path.is_dir():
        if keep_in is not None and keep_in.is_dir():
            is_part = is_own if any(map(is_own, keep_in.iterdir())) else is_exported
            for file in [file for file in path.iterdir() if not is_part(file)]:
                file.rename(keep_in / file.name)
        shutil.rmtree(path)


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
