"""An entry of a checkpoint beside those of Lightning: the random states of every rank, seeds and numbers of steps.

Plain Trainers leave it alone and older checkpoints do not have it:

    checkpoint["lightning_3d"]
        mesh     {"pp": 2, "dp": 2, "cp": 1, "tp": 1}
        optimizers  ["AdamW"]                         their classes; older ones do not have them
        steps    {"seed": ..., "number": ...}         masks of a step follow from them
        ranks    [{"now": ..., "epoch": ...}, ...]    states that several ranks share are stored once
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from typing import Any

import torch.distributed as dist

from lightning_3d.distributed.mesh import Mesh, MeshShape

RUN = "lightning_3d"
"""The entry's key."""


def gather_ranks(own: Mapping[str, object]) -> list[dict[str, object]]:
    """Gather on rank 0 a list by rank, which is empty on others; every rank calls it.

    Args:
        own: Its values; where ranks have the same, the list has one object.
    """
    everyone: list[dict[str, bytes]] | None = [{}] * dist.get_world_size() if dist.get_rank() == 0 else None
    dist.gather_object({name: pickle.dumps(value) for name, value in own.items()}, everyone, dst=0)
    values = {content: pickle.loads(content) for of_rank in everyone or () for content in of_rank.values()}
    return [{name: values[content] for name, content in of_rank.items()} for of_rank in everyone or ()]


def of_this_rank(run: Mapping[str, Any], mesh: Mesh) -> dict[str, Any]:
    """Choose this rank's part of the entry.

    On another mesh all ranks of a replica take what the first rank of that replica had; replicas that there were not
    take that of the first, as all of them begin with the same seed.
    """
    saved = MeshShape(**run["mesh"])
    rank = dist.get_rank()
    if saved != mesh.shape:
        rank = saved.replica_ranks(mesh.dp_rank if mesh.dp_rank < saved.dp else 0)[0]
    state: dict[str, Any] = run["ranks"][rank]
    return state
