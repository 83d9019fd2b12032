"""The files of a checkpoint folder, and its manifest: their sizes and checksums, written when all of them are.

    __0_0.distcp     tensors and other values that rank 0 wrote, and so on for every rank
    .metadata        the index of torch.distributed.checkpoint
    meta.pt          the rest of the Trainer's checkpoint
    manifest.json    {"files": {"__0_0.distcp": {"size": 4096, "xxh3_64": "..."}, ...}, "xxh3_64": "..."}

The manifest's last entry is the checksum of its others, so that a damaged one blames no other file.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path, PurePath
from typing import Any, BinaryIO

import xxhash

from lightning_3d.checkpoint.atomic import MANIFEST

_CHUNK = 1 << 20  # bytes


@dataclass(frozen=True, kw_only=True)
class Checksum:
    """Size in bytes and xxHash (XXH3, 64 bits, hexadecimal) of a file."""

    size: int
    xxh3_64: str

    @staticmethod
    def of_file(path: Path) -> Checksum:
        """Read a file whole, a part at a time."""
        content = xxhash.xxh3_64()
        part, size = bytearray(_CHUNK), 0
        with path.open("rb", buffering=0) as file:
            while count := file.readinto(part):
                content.update(memoryview(part)[:count])
                size += count
        return Checksum(size=size, xxh3_64=content.hexdigest())


class ChecksummedFile:
    """A file that is being written from its start to its end, and its checksum."""

    def __init__(self, file: BinaryIO) -> None:
        self._file, self._size = file, 0
        self._content = xxhash.xxh3_64()
        self.failure: OSError | None = None
        """The error of a write, which torch turns into one that does not name it."""

    def write(self, part: bytes | memoryview) -> int:
        """Write all of it; files that are buffered or on a disk take no less."""
        self._content.update(part)
        self._size += memoryview(part).nbytes
        try:
            return self._file.write(part)
        except OSError as error:
            self.failure = error
            raise

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    @property
    def checksum(self) -> Checksum:
        """The checksum of what was written so far."""
        return Checksum(size=self._size, xxh3_64=self._content.hexdigest())


@contextmanager
def checksummed(file: BinaryIO) -> Iterator[ChecksummedFile]:
    """Write to a file inside.

    Raises:
        OSError: A write has failed, whatever was made of that.
    """
    written = ChecksummedFile(file)
    try:
        yield written
    except Exception as error:
        if written.failure is None:
            raise
        raise written.failure from error


def manifest_of(files: Mapping[str, Checksum]) -> str:
    """The text of a manifest of these files, by name."""
    listed = {name: asdict(files[name]) for name in sorted(files)}
    return json.dumps({"files": listed, "xxh3_64": _of_listed(listed)}, indent=1)


def read_manifest(folder: Path) -> dict[str, Checksum] | None:
    """The files in the manifest of a folder, by name; None if it has no manifest.

    Raises:
        ValueError: The manifest is damaged.
    """
    try:
        text = (folder / MANIFEST).read_bytes()
    except FileNotFoundError:
        return None
    try:
        found = json.loads(text)
        listed = found["files"]
        if found["xxh3_64"] != _of_listed(listed):
            raise ValueError("its checksum is another")
        for name in listed:
            if not name or "\0" in name or PurePath(name).name != name:
                raise ValueError(f"it names {name!r}, which is no file of its folder")
        return {name: Checksum(**entry) for name, entry in listed.items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"{MANIFEST} is damaged: {error}") from None


def _of_listed(listed: Mapping[str, Mapping[str, Any]]) -> str:
    return xxhash.xxh3_64(json.dumps(listed, sort_keys=True).encode()).hexdigest()
