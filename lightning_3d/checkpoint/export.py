"""Converting a checkpoint of any layout, in one process, without GPUs and without the processes that wrote it."""

from __future__ import annotations

import pickle
import re
import shutil
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from functools import partial
from os import PathLike
from pathlib import Path
from typing import Any, Literal, get_args

from lightning_3d.checkpoint import safetensors
from lightning_3d.checkpoint.atomic import MANIFEST, META, is_exported, is_own, local_path, published_path, replacing
from lightning_3d.checkpoint.checksums import Checksum, manifest_of
from lightning_3d.checkpoint.content import MODEL, OPTIMIZERS, TreePath
from lightning_3d.checkpoint.folder import FSDP_MODEL
from lightning_3d.checkpoint.lazy import LazyTensor
from lightning_3d.checkpoint.loading import checked, lazy_checkpoint
from lightning_3d.checkpoint.reading import FolderReader
from lightning_3d.checkpoint.writing import write_file
from lightning_3d.errors import CheckpointError

Format = Literal["safetensors", "file", "folder", "fsdp"]

_OF_TRAINING = (OPTIMIZERS, "lr_schedulers", "callbacks")
"""Entries that Lightning leaves out with ``save_weights_only``."""


def export_checkpoint(
    source: str | PathLike[str],
    target: str | PathLike[str],
    *,
    format: Format = "safetensors",
    prefix: str = "",
    leave_out: Sequence[str] = (),
    max_shard_size: int | str = "5GB",
    optimizer_states: bool = True,
    overwrite: bool = False,
    weights_only: bool = True,
) -> None:
    """Convert a checkpoint; memory holds one tensor of it at a time, or one file of "safetensors".

    Args:
        source: A checkpoint folder of this strategy, of Lightning's ModelParallelStrategy or its FSDPStrategy, or a
            plain Lightning file.
        target: It appears when it is complete.
        format: "safetensors": a folder with the weights, as `transformers` reads them; "file": one plain Lightning
            file, which every strategy resumes from; "folder", "fsdp": a folder that Lightning's ModelParallelStrategy
            and this one, or its FSDPStrategy, resume from.
        prefix: Taken off the names of weights for "safetensors", as in "model." where the LightningModule holds the
            model of `transformers` as `self.model`.
        leave_out: Patterns (`*`) of names of weights that do not go into "safetensors".
        max_shard_size: Bytes of a file of "safetensors", as a number or as in "5GB" and "500MiB".
        optimizer_states: For "file": `False` leaves out all but the weights and where training was.
        overwrite: Whether a checkpoint, or an export, may be there, and is replaced.
        weights_only: As in `torch.load`; `False` unpickles everything, which may run code.

    Raises:
        CheckpointNotFoundError: There is no checkpoint.
        CheckpointError: It can't be read or does not fit the format, or there is something at the target.

    """
    path, there = _local(target), _local(source)
    if format not in get_args(Format):
        raise CheckpointError(f"format {format!r} is none of {', '.join(get_args(Format))}")
    shard_size = _num_bytes(max_shard_size)
    if not optimizer_states and format != "file":
        raise CheckpointError(f"optimizer_states=False is for format 'file', and this is {format!r}")
    if format != "safetensors" and (prefix or leave_out):
        raise CheckpointError(f"prefix and leave_out are for format 'safetensors', and this is {format!r}")
    there = checked(there)
    _check_target(path, there, format, overwrite=overwrite)
    if format == "safetensors":
        weights = lazy_checkpoint(there, weights_only=weights_only, leave_out="rest")[MODEL]
        weights = _named(weights, there, prefix, leave_out)
        write = partial(safetensors.write_safetensors, weights, max_shard_size=shard_size)
    elif format == "file":
        checkpoint = lazy_checkpoint(there, weights_only=weights_only)
        left_out = () if optimizer_states else _OF_TRAINING
        write_file({key: value for key, value in checkpoint.items() if key not in left_out}, path)
        return
    elif there.is_file():
        raise CheckpointError(
            f"{there} is a file, which has no names of optimizers' states for a folder: Lightning's strategies"
            " and this one load it as it is"
        )
    else:
        write = partial(_write_renamed, there, for_fsdp=format == "fsdp")
    with replacing(path) as staged:
        write(staged)


def _local(path: str | PathLike[str]) -> Path:
    if (local := local_path(path)) is None:
        raise CheckpointError(f"{path} is on a remote file system: export works on those that are mounted")
    return local


def _check_target(path: Path, source: Path, format: Format, *, overwrite: bool) -> None:
    there = published_path(path)
    if there.resolve() == source.resolve():
        raise CheckpointError(f"{path} is the checkpoint itself: export to another path")
    if not there.exists():
        return
    if not overwrite:
        raise CheckpointError(f"{path} is there already: export to another path, or set overwrite=True")
    is_part = is_exported if format == "safetensors" else is_own
    is_such = any(map(is_part, there.iterdir())) if there.is_dir() else format == "file" and zipfile.is_zipfile(there)
    if not is_such:
        raise CheckpointError(f"{path} is there already, and is no such checkpoint: overwrite does not replace it")


def _named(weights: Mapping[str, Any], source: Path, prefix: str, leave_out: Sequence[str]) -> dict[str, LazyTensor]:
    """The weights under the names that they get."""
    if unused := [pattern for pattern in leave_out if not any(fnmatchcase(fqn, pattern) for fqn in weights)]:
        raise CheckpointError(f"leave_out has {unused[0]!r}, which no name in {source} matches: {_some(weights)}")
    kept = {fqn: value for fqn, value in weights.items() if not any(fnmatchcase(fqn, p) for p in leave_out)}
    if strangers := [fqn for fqn, value in kept.items() if not isinstance(value, LazyTensor)]:
        raise CheckpointError(f"{_some(strangers)} in {source}: no tensor, as safetensors needs it. Leave it out")
    if others := [fqn for fqn in kept if not fqn.startswith(prefix) or fqn == prefix]:
        raise CheckpointError(
            f"{_some(others)} in {source} do not begin with the prefix {prefix!r}: leave them out (leave_out), or"
            " give another prefix"
        )
    if not kept:
        raise CheckpointError(f"{source} has no weights" + (" but those that are left out" if weights else ""))
    return {fqn.removeprefix(prefix): value for fqn, value in kept.items()}


def _some(names: Sequence[str] | Mapping[str, object]) -> str:
    first = list(names)[:3]
    return ", ".join(first) + (f" and {len(names) - len(first)} more" if len(names) > len(first) else "")


def _num_bytes(size: int | str) -> int:
    found = re.fullmatch(r"(\d+)\s*([KMGT]?)(I?)B?", str(size).strip().upper())
    if found is None or not int(found[1]):
        raise CheckpointError(f"max_shard_size {size!r} is no number of bytes: write 5GB, 500MB, 2GiB or 1000000")
    unit: int = (1024 if found[3] else 1000) ** " KMGT".index(found[2] or " ")
    return int(found[1]) * unit


def _write_renamed(source: Path, folder: Path, *, for_fsdp: bool) -> None:
    """Write a folder for FSDPStrategy or ModelParallelStrategy of Lightning, whose sections of a model differ in name.

    The files of a folder's ranks go over as they are, and its index gets the other names.
    """
    index = FolderReader(source).read_metadata()
    assert index.planner_data is not None
    there, here = (MODEL, FSDP_MODEL) if for_fsdp else (FSDP_MODEL, MODEL)
    sections = {path[0] for path in index.planner_data.values()}
    if there in sections and here not in sections:
        paths: dict[str, TreePath] = {
            key: (here, *path[1:]) if path[0] == there else tuple(path) for key, path in index.planner_data.items()
        }
        keys = {key: ".".join(map(str, path)) for key, path in paths.items()}
        index = replace(
            index,
            state_dict_metadata={keys[key]: stored for key, stored in index.state_dict_metadata.items()},
            planner_data={keys[key]: path for key, path in paths.items()},
            storage_data={replace(at, fqn=keys[at.fqn]): place for at, place in index.storage_data.items()},
        )
    folder.mkdir()
    for name in sorted({stored.relative_path for stored in index.storage_data.values()} | {META}):
        shutil.copyfile(source / name, folder / name)
    with (folder / ".metadata").open("wb") as file:
        pickle.dump(index, file)
    (folder / MANIFEST).write_text(manifest_of({path.name: Checksum.of_file(path) for path in folder.iterdir()}))
