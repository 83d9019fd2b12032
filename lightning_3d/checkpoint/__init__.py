"""Checkpoints that any layout writes and any other layout reads, as a sharded folder or as one plain Lightning file.

Both formats name everything by FQN, so the numbers of stages, data-parallel and tensor-parallel ranks that wrote a
checkpoint do not matter to those that read it. `content` is what one rank holds, by path: `folder` writes it as files
of torch.distributed.checkpoint, and `gathering` brings it to rank 0, which writes one file. `loading` reads both, a
tensor at a time. `trainer_io` is what a Trainer calls, and `export` converts checkpoints in one process.
"""

from __future__ import annotations

from lightning_3d.checkpoint.export import export_checkpoint
from lightning_3d.checkpoint.loading import read_folder

__all__ = ["export_checkpoint", "read_folder"]
