"""Checkpoints that any layout writes and any other layout reads, as a sharded folder or as one plain Lightning file.

Both formats name everything by FQN, so the numbers of stages, data-parallel and tensor-parallel ranks that wrote a
checkpoint do not matter to those that read it. `own_state` is what one rank holds; `folder` writes and reads folders of
torch.distributed.checkpoint; `file` gathers on rank 0 and takes parts out of full tensors; `shown_state` and
`saved_state` are what the user's hooks see of both. `export` converts them.
"""

from __future__ import annotations

from lightning_3d.checkpoint.export import export_checkpoint
from lightning_3d.checkpoint.file import (
    full_model_state,
    full_optimizer_state,
    load_full,
    read_full,
    whole_optimizer_state,
    write_full,
)
from lightning_3d.checkpoint.folder import (
    Folder,
    folder_content,
    is_sharded_checkpoint,
    load_sharded,
    read_sharded,
)
from lightning_3d.checkpoint.further_states import replaced_state, states_apart, states_read, states_whole
from lightning_3d.checkpoint.gathering import Gather, gather
from lightning_3d.checkpoint.late import LateValues
from lightning_3d.checkpoint.optimizer_states import load_optimizers, saved_optimizers
from lightning_3d.checkpoint.own_state import grouped_optimizer_state, model_state, optimizer_state
from lightning_3d.checkpoint.saved_state import SavedState
from lightning_3d.checkpoint.shown_state import hooks_see_saving, shown_parts, shown_whole
from lightning_3d.checkpoint.whole_folder import read_folder
from lightning_3d.checkpoint.writing import write_folder

__all__ = [
    "Folder",
    "Gather",
    "LateValues",
    "folder_content",
    "SavedState",
    "export_checkpoint",
    "full_model_state",
    "full_optimizer_state",
    "gather",
    "grouped_optimizer_state",
    "hooks_see_saving",
    "is_sharded_checkpoint",
    "load_full",
    "load_optimizers",
    "load_sharded",
    "model_state",
    "optimizer_state",
    "read_folder",
    "read_full",
    "read_sharded",
    "replaced_state",
    "saved_optimizers",
    "shown_parts",
    "shown_whole",
    "states_apart",
    "states_read",
    "states_whole",
    "whole_optimizer_state",
    "write_folder",
    "write_full",
]
