"""A model in two pipeline stages; saving a checkpoint folder and restoring a checkpoint, as the strategy does."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
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


class Block(nn.Module):
    """A layer of a size that nothing divides, statistics, a buffer that is not saved, and extra state."""

    def __init__(self, width: int, index: int) -> None:
        super().__init__()
        self.odd = nn.Linear(width, 7)
        self.norm = nn.BatchNorm1d(width)
        self.register_buffer("mask", torch.ones(3, dtype=torch.bool), persistent=False)
        self.calls = {"forward": index, "by_kind": [index, -index]}

    def get_extra_state(self) -> dict[str, Any]:
        return self.calls

    def set_extra_state(self, state: dict[str, Any]) -> None:
        self.calls = state


class Staged(nn.Module):
    """Blocks between an embedding and a head that is tied to it."""

    def __init__(self, num_blocks: int, width: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, width)
        self.blocks = nn.ModuleList(Block(width, index) for index in range(num_blocks))
        self.head = nn.Linear(width, 11, bias=False)
        self.head.weight = self.embed.weight

    @property
    def own(self) -> list[Block]:
        """The blocks that this rank holds."""
        return [block for block in self.blocks if isinstance(block, Block) and not block.odd.bias.is_meta]


def staged(num_blocks: int = 4, width: int = 6) -> tuple[Staged, DeviceMesh]:
    """The model as one of two ranks holds it, a half of the blocks each, and the mesh of its pipeline."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("pp",))
    torch.manual_seed(0)  # initial values
    model = Staged(num_blocks, width)
    for index, block in enumerate(model.blocks):
        if index * 2 // num_blocks != mesh.get_local_rank():
            block.to("meta")
    return model, mesh["pp"]


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
