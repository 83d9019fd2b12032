"""Writing checkpoints aside, folders with the checksums of their files, and putting them in place."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from io import IOBase
from pathlib import Path
from typing import Any, BinaryIO, cast

import torch.distributed as dist
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemWriter
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.state_dict_saver import save
from typing_extensions import override

from lightning_3d.checkpoint.atomic import (
    MANIFEST,
    META,
    NOT_SHARED,
    check_no_others,
    discard_staging,
    is_seen,
    prepare_staging,
    publish,
    replacing,
    staging_path,
)
from lightning_3d.checkpoint.box import Share
from lightning_3d.checkpoint.checksums import Checksum, ChecksummedFile, manifest_of
from lightning_3d.checkpoint.collective_errors import collective_errors
from lightning_3d.checkpoint.lazy import save_lazily
from lightning_3d.errors import CheckpointError

HAS_MANIFEST = "lightning_3d_manifest"
"""Entry in the rest of a checkpoint that came with a manifest."""


FolderContent = tuple[dict[str, object], bytes]
"""The states that a rank writes, in nested dictionaries, and the rest as `torch.save` has it, on rank 0."""


def write_folder(path: Path, content: FolderContent, group: dist.ProcessGroup | None = None) -> None:
    """Write a checkpoint folder, in place of what is there; a collective of all ranks.

    Args:
        path: The same on all ranks, on a file system that all of them share, which is checked.
        content: The part of this rank.
        group: A group of all ranks for CPU tensors; the default one without it.

    Raises:
        CheckpointError: It can't be written; on all ranks. What was there stays.
    """
    state, metadata = content
    action, is_first = f"write the checkpoint {path}", dist.get_rank() == 0
    try:
        with collective_errors(action, group):
            if is_first:
                prepare_staging(path)
                staging_path(path).mkdir()
        with collective_errors(action, group):
            if not is_seen(staging_path(path)):
                raise CheckpointError(
                    f"This rank does not see {staging_path(path)}, which rank 0 has made: {NOT_SHARED}"
                )
        writer = _FolderWriter(staging_path(path))
        with collective_errors(action, group):
            save(state, storage_writer=writer, planner=_Planner(), process_group=group)
        with collective_errors(action, group):
            every: list[dict[str, Checksum]] | None = [{}] * dist.get_world_size() if is_first else None
            dist.gather_object(writer.checksums, every, group=group)
            if every is not None:
                with writer.fs.create_stream(staging_path(path) / META, "wb") as file:
                    file.write(metadata)
                files = {name: checksum for of_rank in (*every, writer.checksums) for name, checksum in of_rank.items()}
                _check_all_seen(staging_path(path), files)
                (staging_path(path) / MANIFEST).write_text(manifest_of(files))
                publish(path)
    except CheckpointError:
        if is_first:
            discard_staging(path)
        raise


def _check_all_seen(folder: Path, files: Mapping[str, Checksum]) -> None:
    """Check that what all ranks have written is in this rank's folder.

    Raises:
        CheckpointError: It is not.
    """
    sizes = {name: (folder / name).stat().st_size if is_seen(folder / name) else None for name in files}
    if others := [name for name, size in sizes.items() if size != files[name].size]:
        named = ", ".join(others[:3]) + (", ..." if others[3:] else "")
        what = f"{len(others)} of {len(files)} files are not in {folder} as they were written ({named})"
        raise CheckpointError(f"{what}: {NOT_SHARED}")


def write_file(checkpoint: Mapping[str, object], path: Path) -> None:
    """Write a `.ckpt` file, in place of a file or checkpoint folder there; on one rank.

    Args:
        checkpoint: What is written, where tensors may be lazy.
        path: The path of the file.

    Raises:
        CheckpointError: There is a folder with files of others; nothing is changed.
        OSError: It can't be written; what was there stays.

    """
    check_no_others(path)
    with replacing(path) as staged, staged.open("wb") as file, ChecksummedFile(file).naming_failures() as written:
        save_lazily(checkpoint, cast(BinaryIO, written))


class _Planner(DefaultSavePlanner):
    @override
    def lookup_object(self, index: MetadataIndex) -> object:
        """The value that is written; torch's own looks for a box in nothing but tensors."""
        value = self.state_dict[index.fqn]
        return value.__get_tensor_shard__(index) if isinstance(value, Share) else value


class _FolderWriter(FileSystemWriter):
    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.fs: Any = _ChecksummedFiles()

    @property
    def checksums(self) -> dict[str, Checksum]:
        """Checksums of the files that this rank has written, by name."""
        # torch writes the index to another name first
        return {name.removesuffix(".tmp"): checksum for name, checksum in self.fs.checksums.items()}


class _ChecksummedFiles(FileSystem):
    def __init__(self) -> None:
        self.checksums: dict[str, Checksum] = {}

    @contextmanager
    @override
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[IOBase]:
        with super().create_stream(path, mode) as file:
            if mode != "wb":
                yield file
                return
            with ChecksummedFile(cast(Any, file)).naming_failures() as written:
                yield cast(IOBase, written)
            self.checksums[Path(path).name] = written.checksum
