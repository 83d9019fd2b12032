"""Pools of ranks that have the second device."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch.distributed as dist

from tests.second_device import build, device
from tests.workers import WorkerPools

_SIZES = (1, 2, 4)


class RanksOf:
    """``ranks(n).run(function, *args)`` on ranks of a device.

    Args:
        library: Of the second device; None for one that PyTorch has itself.
    """

    def __init__(self, pools: WorkerPools, library: Path | None) -> None:
        self._pools, self._library = pools, library

    def __call__(self, world_size: int) -> RanksOf:
        self._pool = self._pools(world_size)
        return self

    def run(self, function: Callable[..., Any], *args: Any, timeout: float = 300) -> list[Any]:
        return self._pool.run(_on_device, self._library, function, *args, timeout=timeout)

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


def _on_device(library: Path | None, function: Callable[..., Any], *args: Any) -> Any:
    if library is not None and not device.is_loaded():
        device.load(library)
    if dist.is_initialized() and dist.get_backend() == "gloo":
        dist.destroy_process_group()  # the pool's; the strategy makes one with the device's backend
    return function(*args)
