"""Whether the files of a checkpoint are as they were written, by the manifest of a folder or a file's own checksums."""

from __future__ import annotations

import zipfile
from collections.abc import Iterator
from os import PathLike
from pathlib import Path

import torch.distributed as dist

from lightning_3d.checkpoint.atomic import completed
from lightning_3d.checkpoint.manifest import MANIFEST, damaged, read_manifest
from lightning_3d.errors import CheckpointError, CheckpointNotFoundError

REPAIR = "Load another checkpoint, or copy this one again from where it is whole"
"""The way on from damage."""

_NUM_NAMED = 5
_CHUNK = 1 << 20  # bytes
_ZIP = b"PK"  # that such files start with


def check_files(path: Path) -> None:
    """Check all files of a checkpoint, a folder or a `.ckpt` file, each by one of the ranks; a collective of all ranks.

    Raises:
        CheckpointError: Files are damaged; on all ranks, with their names.

    """
    problems: list[list[str]] = [[]] * dist.get_world_size()
    dist.all_gather_object(problems, damage(path, rank=dist.get_rank(), num_ranks=dist.get_world_size()))
    raise_of_damage(path, sorted({problem for of_rank in problems for problem in of_rank}))


def verify_checkpoint(location: str | PathLike[str]) -> str:
    """Check all files of a checkpoint in this process.

    Args:
        location: A checkpoint folder or a `.ckpt` file.

    Returns:
        A description of what was compared.

    Raises:
        CheckpointNotFoundError: There is none.
        CheckpointError: Files are damaged, or there are no checksums to compare them with.

    """
    path = completed(Path(location))
    if not path.exists():
        raise CheckpointNotFoundError(f"there is no checkpoint {path}")
    if not has_checksums(path):
        raise CheckpointError(
            f"{path} has no checksums to compare it with: "
            + (f"folders of Lightning have no {MANIFEST}" if path.is_dir() else "it is no file of torch.save")
        )
    raise_of_damage(path, damage(path), num_named=None)
    if path.is_dir():
        files = read_manifest(path) or {}
        return f"{len(files)} files, {sum(file.size for file in files.values())} bytes"
    return f"one file, {path.stat().st_size} bytes"


def raise_of_damage(path: Path, problems: list[str], num_named: int | None = _NUM_NAMED) -> None:
    """Raise if there are problems.

    Args:
        path: The checkpoint.
        problems: Lines on it.
        num_named: As many of them are told; None for all.

    Raises:
        CheckpointError: There are.
    """
    if problems:
        named = "; ".join(problems[:num_named])
        more = f"; and {len(problems) - num_named} more" if num_named is not None and len(problems) > num_named else ""
        raise CheckpointError(f"{path} is damaged: {named}{more}. {REPAIR}")


def damage(path: Path, *, rank: int = 0, num_ranks: int = 1) -> list[str]:
    """The problems of a checkpoint folder or `.ckpt` file, a line each.

    Folders without a manifest and files that are no zip archives have no checksums, and so no problems.

    Args:
        rank: Reads every file, or record in a file, from this one on whose turn it is.
        num_ranks: As many read the others.
    """
    if not path.is_dir():
        return list(_in_file(path, rank, num_ranks))
    try:
        files = read_manifest(path)
    except (OSError, ValueError) as error:
        return [str(error)]
    return [] if files is None else damaged(path, files, sorted(files)[rank::num_ranks])


def has_checksums(path: Path) -> bool:
    """Whether `damage` could find anything."""
    if path.is_dir():
        return (path / MANIFEST).exists()
    with path.open("rb") as file:
        return file.read(len(_ZIP)) == _ZIP


def _in_file(path: Path, rank: int, num_ranks: int) -> Iterator[str]:
    """The records of a zip archive, as torch writes it, that differ from their CRC-32."""
    try:
        if not has_checksums(path):
            return
        with zipfile.ZipFile(path) as archive:
            records = [record for record in archive.infolist() if record.CRC != 0]  # else it was not computed
            for record in records[rank::num_ranks]:
                try:
                    with archive.open(record) as content:
                        while content.read(_CHUNK):
                            pass
                except OSError:
                    raise
                except Exception as error:
                    yield f"the record {record.filename} in {path.name} has another content than was written ({error})"
    except FileNotFoundError:
        return  # who opens it next says so
    except OSError as error:
        yield f"{path.name} can't be read ({error})"
    except Exception as error:  # of many kinds, where an archive was altered
        yield f"{path.name} was cut off or altered ({error})"
