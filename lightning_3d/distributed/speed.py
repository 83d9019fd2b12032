"""The speed of this machine, measured on all of its ranks at once, as they share cores and links; takes some 10 ms."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.nn.functional as F

from lightning_3d.distributed.groups import MeshGroups
from lightning_3d.distributed.machine import Link, Machine, Network

_TURNS = 4  # of which the fastest counts, after one that warms up
_SMALL = 2**10  # elements, of what takes next to no time to send or to compute
_LARGE = 2**20
_CALLS = 50


def measured_machine(device: torch.device, dtype: torch.dtype, ranks_per_node: int) -> Machine:
    """The slowest rank's speed; every rank calls it.

    Args:
        dtype: Of products of matrices.
    """
    flops, writes, call = device_speed(device, dtype)
    between = link_speeds(device, None)
    inside, num_nodes = between, dist.get_world_size() // ranks_per_node
    if num_nodes > 1 and ranks_per_node > 1:
        nodes = [
            list(range(first, first + ranks_per_node)) for first in range(0, dist.get_world_size(), ranks_per_node)
        ]
        inside = link_speeds(device, MeshGroups(None, device.type).make(nodes))
    return Machine(
        flops=flops,
        writes=writes,
        call=call,
        ranks_per_node=ranks_per_node,
        inside=inside,
        between=between,
        overlaps=device.type != "cpu",
    )


def device_speed(device: torch.device, dtype: torch.dtype) -> tuple[float, float, float]:
    """Operations per second of products of matrices, bytes per second that are written, and seconds of an operator, on
    the slowest rank; every rank calls it.
    """
    width = 512 if device.type == "cpu" else 4096
    matrix, values = torch.randn(width, width, device=device, dtype=dtype), torch.randn(_LARGE, device=device)
    small = torch.ones(8, device=device, requires_grad=True)

    def call() -> None:
        result = small
        for _ in range(_CALLS):
            result = result * small
        result.sum().backward()

    with torch.enable_grad():
        seconds = [_fastest(run, device) for run in (lambda: matrix @ matrix, lambda: F.gelu(values), call)]
    of_product, of_values, of_calls = _slowest(seconds)
    return 2 * width**3 / of_product, 4 * _LARGE / of_values, of_calls / (2 * _CALLS)


def link_speeds(device: torch.device, group: dist.ProcessGroup | None) -> Network:
    """The links between the ranks of a group.

    Every rank calls it with its group, of which all have the same size.
    """
    num, rank = dist.get_world_size(group), dist.get_rank(group)

    def collectives(size: int) -> dict[str, tuple[Callable[[], object], float]]:
        full, row = torch.ones(size // num * num, device=device), torch.ones(size // num, device=device)
        rows, share = full.nbytes, (num - 1) / num

        def send() -> None:
            if rank % 2 and num > 1:
                dist.recv(full, group=group, group_src=rank - 1)
            elif rank + 1 < num:
                dist.send(full, group=group, group_dst=rank + 1)

        return {
            "all-reduce": (lambda: dist.all_reduce(full, group=group), 2 * rows * share),
            "all-gather": (lambda: dist.all_gather_single(full, row, group), rows * share),
            "reduce-scatter": (lambda: dist.reduce_scatter_single(row, full, group=group), rows * share),
            "send": (send, rows),
        }

    small, large, found = collectives(_SMALL), collectives(_LARGE), dict[str, Link]()
    for kind in small if num > 1 else ():
        latency, seconds = _slowest([_fastest(run, device, group) for run in (small[kind][0], large[kind][0])])
        found[kind] = Link(bandwidth=large[kind][1] / max(seconds - latency, seconds / 10), latency=latency)
    return found


def _fastest(run: Callable[[], object], device: torch.device, group: dist.ProcessGroup | None = None) -> float:
    seconds = []
    for _ in range(1 + _TURNS):
        dist.barrier(group)
        start = time.perf_counter()
        run()
        if device.type != "cpu":
            torch.accelerator.synchronize(device)
        seconds.append(time.perf_counter() - start)
    return min(seconds[1:])


def _slowest(seconds: list[float]) -> list[float]:
    everyone = [seconds] * dist.get_world_size()
    dist.all_gather_object(everyone, seconds)
    return [max(of_ranks) for of_ranks in zip(*everyone, strict=True)]
