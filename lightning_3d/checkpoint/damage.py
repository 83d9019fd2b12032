"""Whether the files of a checkpoint are as they were written, by the manifest of a folder or a file's own checksums."""

from __future__ import annotations

import zipfile
from collections.abc import Iterator
from pathlib import Path

import torch.distributed as dist

from lightning_3d.checkpoint.manifest import Checksum, read_manifest
from lightning_3d.errors import CheckpointError

REPAIR = "Load another checkpoint, or copy this one again from where it is whole"
"""The way on from damage."""

_NUM_NAMED = 50
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


def raise_of_damage(path: Path, problems: list[str]) -> None:
    """Raise if there are problems.

    Args:
        path: The checkpoint.
        problems: Lines on it.

    Raises:
        CheckpointError: There are.
    """
    if problems:
        named = "; ".join(problems[:_NUM_NAMED])
        more = f"; and {len(problems) - _NUM_NAMED} more" if len(problems) > _NUM_NAMED else ""
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
        files = read_manifest(path) or {}
    except (OSError, ValueError) as error:
        return [str(error)]
    names = sorted(files)[rank::num_ranks]
    return [problem for name in names if (problem := _problem(path / name, files[name]))]


def is_zip(path: Path) -> bool:
    """Whether a file is such an archive as torch.save writes, with checksums."""
    with path.open("rb") as file:
        return file.read(len(_ZIP)) == _ZIP


def _problem(path: Path, listed: Checksum) -> str | None:
    try:
        if path.exists() and not path.is_file():  # reading some would never end
            return f"{path.name} is no file"
        size = path.stat().st_size
        if size != listed.size:
            return f"{path.name} has {size} bytes and had {listed.size} when it was written"
        if Checksum.of_file(path) != listed:
            return f"{path.name} has another content than was written (its checksum differs)"
    except FileNotFoundError:
        return f"{path.name} is missing"
    except OSError as error:
        return f"{path.name} can't be read ({error})"
    return None


def _in_file(path: Path, rank: int, num_ranks: int) -> Iterator[str]:
    """The records of a zip archive, as torch writes it, that differ from their CRC-32."""
    try:
        if not is_zip(path):
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
