"""Pools of ranks that have the second device."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.second_device import build, device
from tests.workers import WorkerPools

_SIZES = (1, 2, 4)


class RanksOf:
    """``ranks(n).run(function, *args)`` on ranks of a device.

    More ranks than there are GPUs share the first one, each as a node of its own: NCCL refuses two ranks of one host on
    a GPU, and takes those of different hosts, which it connects by sockets.

    Args:
        library: Of the second device; None for one that PyTorch has itself.
    """

    def __init__(self, pools: WorkerPools, library: Path | None) -> None:
        self._pools, self._library = pools, library
        self._is_shared = False

    def __call__(self, world_size: int) -> RanksOf:
        self._pool = self._pools(world_size)
        self._is_shared = self._library is None and world_size > torch.accelerator.device_count()
        return self

    def run(self, function: Callable[..., Any], *args: Any, timeout: float = 300) -> list[Any]:
        return self._pool.run(_on_device, self._library, self._is_shared, function, *args, timeout=timeout)

    def close(self) -> None:
        self._pool.close()


@contextmanager
def ranks_of(name: str, pools: WorkerPools) -> Iterator[RanksOf]:
    """Ranks of a device, in processes of their own."""
    ranks = RanksOf(pools, build.library() if name == device.NAME else None)
    for size in _SIZES:
        pools(size).close()
    yield ranks
    for size in _SIZES:
        pools(size).close()


def _on_device(library: Path | None, is_shared: bool, function: Callable[..., Any], *args: Any) -> Any:
    if is_shared:
        os.environ.update(_node_of_its_own(os.environ["RANK"], os.environ["WORLD_SIZE"]))
    if library is not None and not device.is_loaded():
        device.load(library)
    torch.backends.cudnn.allow_tf32 = False  # the CPU, which results are compared with, computes in fp32
    if dist.is_initialized() and dist.get_backend() == "gloo":
        dist.destroy_process_group()  # the pool's; the strategy makes one with the device's backend
    return function(*args)


def _node_of_its_own(rank: str, world_size: str) -> dict[str, str]:
    ranks = {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "GROUP_RANK": rank, "GROUP_WORLD_SIZE": world_size}
    return ranks | {"NCCL_HOSTID": f"node {rank}", "NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1"}
