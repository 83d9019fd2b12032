"""Starting the ranks of a benchmark on this machine."""

from __future__ import annotations

import os
import socket
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import spawn

from lightning_3d.ranks.process_exit import destroy_groups


def run_ranks(function: Callable[..., Any], world_size: int, *args: Any) -> Any:
    """Run ``function(*args)`` on every rank of a gloo group, each on one thread; returns what rank 0 returned."""
    with socket.socket() as free, tempfile.TemporaryDirectory() as folder:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
        free.close()
        answer = Path(folder) / "answer.pt"
        spawn(_rank, (world_size, port, answer, function, args), nprocs=world_size)
        return torch.load(answer, weights_only=False)


def _rank(rank: int, world_size: int, port: int, answer: Path, function: Callable[..., Any], args: Any) -> None:
    torch.set_num_threads(1)
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(world_size),
        LOCAL_WORLD_SIZE=str(world_size),
        GROUP_RANK="0",
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        TORCHELASTIC_RUN_ID="benchmark",  # Lightning then takes these processes as they are
    )
    dist.init_process_group("gloo")
    result = function(*args)
    if rank == 0:
        torch.save(result, answer)
    destroy_groups()
