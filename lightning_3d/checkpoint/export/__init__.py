"""Checkpoints in the formats of others, made in one process with one tensor in memory at a time.

`source` is a checkpoint whose tensors are read when they are asked for, from a folder (`chunks`) or a file;
`safetensors`, `lightning_file` and `renamed_folder` write it; `conversion` chooses between them.
"""

from __future__ import annotations

from lightning_3d.checkpoint.export.conversion import FORMATS, Format, export_checkpoint

__all__ = ["FORMATS", "Format", "export_checkpoint"]
