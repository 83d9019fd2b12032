"""The link to the newest checkpoint that ``ModelCheckpoint(save_last="link")`` keeps, of runs that may be killed.

Lightning removes the checkpoint that the link points to, then the link, and then makes another one. Here the link is
replaced by one rename, before the checkpoint that it points to is removed; so it always points to one.

    epoch=1.ckpt is written      last.ckpt -> epoch=0.ckpt
    the link changes             last.ckpt -> epoch=1.ckpt
    epoch=0.ckpt is removed
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from lightning_3d.checkpoint.atomic import replacing
from lightning_3d.checkpoint.manifest import check_no_others


def link(checkpoint: Path, path: Path, *, may_come: bool = False) -> None:
    """Let a path be a link to a checkpoint, or a copy of it where the file system has no links.

    Args:
        checkpoint: Where there is none, nothing changes.
        path: The path of the link.
        may_come: Whether the checkpoint is still being written, and the link is made nevertheless.

    Raises:
        CheckpointError: There is a checkpoint folder with files that are no part of it.
    """
    is_missing = not may_come and not checkpoint.exists()
    if is_missing or os.path.abspath(checkpoint) == os.path.abspath(path):
        return
    if not path.is_symlink():
        check_no_others(path)
    with replacing(path, lambda file: True) as staged:
        try:
            staged.symlink_to(os.path.relpath(checkpoint, path.parent))
        except OSError:
            if checkpoint.is_dir():
                shutil.copytree(checkpoint, staged)
            else:
                shutil.copyfile(checkpoint, staged)


def link_before_removal(gone: Path, newest: Path, path: Path) -> None:
    """Let a link to a checkpoint that is about to be removed point to the newest one."""
    if path.is_symlink() and path.resolve() == gone.resolve():
        link(newest, path)
