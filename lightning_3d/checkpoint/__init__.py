"""Checkpoints that any layout writes and any other layout reads, as a sharded folder or as one plain Lightning file.

Both formats name everything by FQN, so the numbers of stages, data-parallel and tensor-parallel ranks that wrote a
checkpoint do not matter to those that read it. `own_state` is what one rank holds; `folder` writes and reads folders of
torch.distributed.checkpoint; `file` gathers on rank 0 and takes parts out of full tensors; `shown_state` and
`saved_state` are what the user's hooks see of both; `trainer_io` is what a Trainer calls. `export` converts them.
"""

from __future__ import annotations

from lightning_3d.checkpoint.export import export_checkpoint
from lightning_3d.checkpoint.file import full_model_state, load_full, read_full, whole_optimizer_state, write_full
from lightning_3d.checkpoint.folder import folder_content, is_sharded_checkpoint, load_sharded, read_sharded
from lightning_3d.checkpoint.optimizer_states import load_optimizers, saved_optimizers
from lightning_3d.checkpoint.own_state import model_shares, model_state, optimizer_state
from lightning_3d.checkpoint.source import read_folder
from lightning_3d.checkpoint.writing import write_folder

__all__ = [
    "export_checkpoint",
    "folder_content",
    "full_model_state",
    "is_sharded_checkpoint",
    "load_full",
    "load_optimizers",
    "load_sharded",
    "model_shares",
    "model_state",
    "optimizer_state",
    "read_folder",
    "read_full",
    "read_sharded",
    "saved_optimizers",
    "whole_optimizer_state",
    "write_folder",
    "write_full",
]
