"""Whether a checkpoint is as it was written: a folder by its manifest, a file by the checksums of its records.

__0_0.distcp     tensors and other values that rank 0 wrote, and so on for every rank
.metadata        the index of torch.distributed.checkpoint
meta.pt          the rest of the Trainer's checkpoint
manifest.json    {"files": {"__0_0.distcp": {"size": 4096, "xxh3_64": "..."}, ...}}
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from hashlib import file_digest
from pathlib import Path
from typing import BinaryIO
from zipfile import BadZipFile, ZipFile, ZipInfo, is_zipfile

import torch.distributed as dist
import xxhash

from lightning_3d.checkpoint.atomic import MANIFEST
from lightning_3d.distributed.agreement import gather_objects
from lightning_3d.errors import CheckpointError

REPAIR = "Load another checkpoint, or copy this one again from where it is whole"
"""The way on from damage."""

_NUM_NAMED = 50
_CHUNK = 1 << 20  # bytes
_NUM_THREADS = 4  # that read records: zlib lets go of Python's lock


@dataclass(frozen=True, kw_only=True)
class Checksum:
    """Size in bytes and xxHash (XXH3, 64 bits, hexadecimal) of a file."""

    size: int
    xxh3_64: str

    @staticmethod
    def of_file(path: Path) -> Checksum:
        """Read a file, a part at a time."""
        with path.open("rb", buffering=0) as file:
            content = file_digest(file, xxhash.xxh3_64)
            return Checksum(size=file.tell(), xxh3_64=content.hexdigest())


class ChecksummedFile:
    """A file that is being written from its start to its end, and its checksum."""

    def __init__(self, file: BinaryIO) -> None:
        self._file, self._size, self._content = file, 0, xxhash.xxh3_64()
        self._failure: OSError | None = None

    def write(self, part: bytes | memoryview) -> int:
        """Write all of it; files that are buffered or on a disk take no less."""
        self._content.update(part)
        self._size += memoryview(part).nbytes
        try:
            return self._file.write(part)
        except OSError as error:
            self._failure = error
            raise

    def __getattr__(self, name: str) -> object:
        return getattr(self._file, name)

    @property
    def checksum(self) -> Checksum:
        """The checksum of what was written so far."""
        return Checksum(size=self._size, xxh3_64=self._content.hexdigest())

    @contextmanager
    def naming_failures(self) -> Iterator[ChecksummedFile]:
        """Raise inside the error of a write, which torch turns into one that does not name it."""
        try:
            yield self
        except Exception as error:
            if self._failure is None:
                raise
            raise self._failure from error


# ------------------------------------------------------------------------------------------------------------ manifests


def manifest_of(files: Mapping[str, Checksum]) -> str:
    """The text of a manifest of these files, by name."""
    listed = {name: asdict(files[name]) for name in sorted(files)}
    return json.dumps({"files": listed}, indent=1)


def read_manifest(folder: Path) -> dict[str, Checksum] | None:
    """The files in the manifest of a folder, by name; None if it has no manifest.

    Raises:
        ValueError: The manifest is damaged.
    """
    try:
        listed = json.loads((folder / MANIFEST).read_bytes())["files"]
        return {name: Checksum(**entry) for name, entry in listed.items()}
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"{MANIFEST} is damaged: {error}") from None


# --------------------------------------------------------------------------------------------------------------- damage


def check_content(path: Path, *, is_shared: bool = False) -> None:
    """Check all files of a checkpoint folder, or all records of a file.

    Args:
        is_shared: Whether each is read by one of the ranks, which all call it.

    Raises:
        CheckpointError: Some are damaged; with their names, of all ranks.
    """
    problems = [] if is_shared else damage(path)
    if is_shared:
        everyone = gather_objects(damage(path, rank=dist.get_rank(), num_ranks=dist.get_world_size()))
        problems = sorted({problem for of_rank in everyone for problem in of_rank})
    if problems:
        named = "; ".join(problems[:_NUM_NAMED])
        more = f"; and {len(problems) - _NUM_NAMED} more" if len(problems) > _NUM_NAMED else ""
        raise CheckpointError(f"{path} is damaged: {named}{more}. {REPAIR}")


def damage(path: Path, *, rank: int = 0, num_ranks: int = 1) -> list[str]:
    """The problems of a checkpoint, a line each; a folder without a manifest has none.

    Args:
        rank: Reads every file, or record, from this one on whose turn it is.
        num_ranks: As many read the others.
    """
    if path.is_file():
        return _damaged_records(path, rank, num_ranks)
    try:
        files = read_manifest(path) or {}
    except (OSError, ValueError) as error:
        return [str(error)]
    names = sorted(files)[rank::num_ranks]
    return [f"{name} {problem}" for name in names if (problem := _problem(path / name, files[name]))]


def _problem(path: Path, listed: Checksum) -> str | None:
    try:
        if path.exists() and not path.is_file():  # reading some would never end
            return "is no file"
        if (size := path.stat().st_size) != listed.size:
            return f"has {size} bytes and had {listed.size} when it was written"
        is_as_written = Checksum.of_file(path) == listed
    except FileNotFoundError:
        return "is missing"
    except OSError as error:
        return f"can't be read ({error})"
    return None if is_as_written else "has another content than was written (its checksum differs)"


def _damaged_records(path: Path, rank: int, num_ranks: int) -> list[str]:
    """The records of an archive of torch.save that have lost their CRC-32, which torch.load does not compare."""
    if not is_zipfile(path):  # of an old torch.save; or cut off, which torch.load tells
        return []
    try:
        with ZipFile(path) as archive, ThreadPoolExecutor(_NUM_THREADS) as threads:
            records = sorted(archive.infolist(), key=lambda record: record.file_size)
            if not any(record.CRC for record in records):  # torch.serialization.set_crc32_options(False)
                return []
            own = records[rank::num_ranks]
            are_whole = list(threads.map(lambda record: _is_whole(archive, record), own))
    except BadZipFile as error:
        return [f"its index can't be read ({error})"]
    damaged = [record.filename for record, is_whole in zip(own, are_whole, strict=True) if not is_whole]
    return [f"its record {name} has another content than was written" for name in damaged]


def _is_whole(archive: ZipFile, record: ZipInfo) -> bool:
    try:
        with archive.open(record) as file:
            while file.read(_CHUNK):  # compares the checksum at the end
                pass
    except Exception:  # of a damaged header any
        return False
    return True
