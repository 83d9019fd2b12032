"""Saving a checkpoint folder and restoring a checkpoint, as the strategy does: the model, then its optimizers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from lightning_3d.checkpoint import (
    folder_content,
    load_full,
    load_optimizers,
    load_sharded,
    read_sharded,
    saved_optimizers,
    write_folder,
)


def save_sharded(
    path: Path,
    checkpoint: Mapping[str, Any],
    pp: DeviceMesh | None,
    further: Mapping[str, Mapping[str, Any]] = MappingProxyType({}),
) -> None:
    """Write a checkpoint folder at once; a collective of all ranks."""
    write_folder(path, folder_content(checkpoint, pp, further))


def restore_folder(path: Path, model: nn.Module, optimizers: Sequence[Optimizer] = ()) -> None:
    """Load a checkpoint folder; without optimizers for evaluation."""
    folder, _ = read_sharded(path)
    load_sharded(folder, model, strict=True)
    if optimizers:
        load_optimizers(saved_optimizers(folder), model, optimizers, strict=True)


def restore_full(checkpoint: Mapping[str, Any], model: nn.Module, optimizers: Sequence[Optimizer]) -> None:
    """The same of a checkpoint that is whole."""
    load_full(checkpoint["state_dict"], model, strict=True)
    load_optimizers(checkpoint["optimizer_states"], model, optimizers, strict=True)
