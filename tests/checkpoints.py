"""A model in two pipeline stages; saving a checkpoint folder and restoring a checkpoint, as the strategy does."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.optim import Optimizer

from lightning_3d.checkpoint.content import content_of, joined
from lightning_3d.checkpoint.folder import folder_content
from lightning_3d.checkpoint.gathering import Gathering
from lightning_3d.checkpoint.loading import read_checkpoint
from lightning_3d.checkpoint.optimizer_states import load_optimizers
from lightning_3d.checkpoint.own_state import load_model
from lightning_3d.checkpoint.writing import write_file, write_folder


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


def save_folder(path: Path, checkpoint: Mapping[str, Any], pp: DeviceMesh | None) -> None:
    """Write a checkpoint folder at once; a collective of all ranks."""
    write_folder(path, folder_content(content_of(checkpoint), pp, {}))


def save_file(path: Path, checkpoint: Mapping[str, Any]) -> None:
    """Write a file, for which rank 0 gathers a tensor at a time; a collective of all ranks."""
    content = content_of(checkpoint)
    gathering = Gathering(content.values)
    num_optimizers = len(checkpoint.get("optimizer_states", ())) or None
    gathering.with_peers_serving(lambda: write_file(joined(gathering.values(), content.metadata, num_optimizers), path))
    dist.barrier()


def restore(path: Path, model: nn.Module, optimizers: Sequence[Optimizer] = ()) -> dict[str, Any]:
    """Load a checkpoint, without optimizers for evaluation; the rest of it."""
    checkpoint = read_checkpoint(path, model, weights_only=True)
    load_model(checkpoint.pop("state_dict"), model, strict=True)
    states = checkpoint.pop("optimizer_states", [])
    if optimizers:
        load_optimizers(states, model, optimizers, strict=True)
    return checkpoint
