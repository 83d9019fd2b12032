"""An entry of a checkpoint beside those of Lightning: the random states of every rank, seeds and numbers of steps.

Plain Trainers leave it alone and older checkpoints do not have it:

    checkpoint["lightning_3d"]
        mesh     {"pp": 2, "dp": 2, "cp": 1, "tp": 1}
        steps    {"seed": ..., "number": ...}         masks of a step follow from them
        classes  {"optimizers": [["torch.optim.adamw.AdamW"]], "schedulers": [...]}
        ranks    [{"now": ..., "epoch": ...}, ...]    states that several ranks share are stored once
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import torch.distributed as dist
from torch import Tensor

from lightning_3d.distributed.mesh import Mesh, MeshShape

RUN = "lightning_3d"
"""The entry's key."""


def gather_ranks(own: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Gather on rank 0 a list by rank, which is empty on others; every rank calls it.

    Args:
        own: Its values are sent once where several ranks have the same.
    """
    world_size, rank = dist.get_world_size(), dist.get_rank()
    digests: list[dict[str, str]] = [{}] * world_size
    dist.all_gather_object(digests, {name: _digest(value) for name, value in own.items()})
    owner: dict[str, int] = {}
    for index, of_rank in enumerate(digests):
        for digest in of_rank.values():
            owner.setdefault(digest, index)
    mine = {digest: own[name] for name, digest in digests[rank].items() if owner[digest] == rank}
    everyone: list[dict[str, Any]] | None = [{}] * world_size if rank == 0 else None
    dist.gather_object(mine, everyone, dst=0)
    if everyone is None:
        return []
    values = {digest: value for of_rank in everyone for digest, value in of_rank.items()}
    return [{name: values[digest] for name, digest in of_rank.items()} for of_rank in digests]


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


def _digest(value: Any) -> str:
    sums = hashlib.blake2b(digest_size=16)
    _update(sums, value)
    return sums.hexdigest()


def _update(sums: Any, value: Any) -> None:
    if isinstance(value, Tensor):
        sums.update(f"{value.dtype}{tuple(value.shape)}".encode() + value.cpu().contiguous().numpy().tobytes())
    elif isinstance(value, Mapping | list | tuple):
        sums.update(f"{type(value).__name__}{len(value)}".encode())
        for key, entry in value.items() if isinstance(value, Mapping) else enumerate(value):
            sums.update(repr(key).encode())
            _update(sums, entry)
    else:
        sums.update(repr(value).encode())
