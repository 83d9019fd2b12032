"""Folders for Lightning's FSDPStrategy and ModelParallelStrategy, which give the model's section different names.

The files of a folder's ranks go over as they are, and its index gets the other names.
"""

from __future__ import annotations

import pickle
import shutil
from dataclasses import replace
from pathlib import Path

from lightning_3d.checkpoint.atomic import MANIFEST, META
from lightning_3d.checkpoint.checksums import Checksum, manifest_of
from lightning_3d.checkpoint.content import MODEL
from lightning_3d.checkpoint.folder import FSDP_MODEL
from lightning_3d.checkpoint.reading import FolderReader
from lightning_3d.checkpoint.share import TreePath


def write_renamed(source: Path, folder: Path, *, for_fsdp: bool) -> None:
    """Write a checkpoint folder with the names of one of the two strategies.

    Args:
        source: A checkpoint folder.
        folder: A folder that is not there.
        for_fsdp: Whether FSDPStrategy is to load it.
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
