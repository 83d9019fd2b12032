"""The memory that a device has for this process."""

from __future__ import annotations

import os
import resource
import sys
from pathlib import Path

import torch

SHARE = 0.9
"""The part of a device's free memory that is planned with: predictions and allocators are not exact."""

_MEMINFO = Path("/proc/meminfo")
_STATM = Path("/proc/self/statm")
_CGROUP = Path("/sys/fs/cgroup/memory.max")


def total_memory(device: torch.device, world_size: int) -> int:
    """Bytes of the device; on the CPU the share of each of the node's ranks: of all, if no launcher says how many."""
    if device.type != "cpu":
        return int(torch.accelerator.get_memory_info(device)[1])
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min(total, _limit() or total) // _num_local_ranks(world_size)


def available_memory(device: torch.device, world_size: int, held: int) -> int:
    """Bytes that this process may hold, as far as they are free now.

    Args:
        held: Bytes of tensors that the process holds already.
    """
    if device.type != "cpu":
        free = int(torch.accelerator.get_memory_info(device)[0])
        unused = torch.accelerator.memory_reserved(device) - torch.accelerator.memory_allocated(device)
        return int(SHARE * (free + unused)) + held
    total = total_memory(device, world_size)
    if not _MEMINFO.exists():
        return int(SHARE * total)
    lines = dict(line.split(":", 1) for line in _MEMINFO.read_text().splitlines())
    free = int(lines["MemAvailable"].split()[0]) * 1024 // _num_local_ranks(world_size)
    return int(SHARE * min(free + held, total))


def host_memory() -> tuple[int | None, int]:
    """Bytes of the host's memory that this process has now, if the system tells, and at most so far."""
    unit = 1 if sys.platform == "darwin" else 1024  # ru_maxrss is in bytes there, in KiB on Linux
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    if not _STATM.exists():
        return None, peak
    return int(_STATM.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE"), peak


def workspaces(device: torch.device) -> int:
    """Bytes that torch takes for products of matrices on CUDA, for the thread of forwards and for that of backwards.

    They are cuBLAS's own sizes, which hold as long as ``CUBLAS_WORKSPACE_CONFIG`` sets no others.
    """
    if device.type != "cuda":
        return 0
    is_large = torch.cuda.get_device_capability(device)[0] in (9, 10)
    return 2 * (32 * 2**20 if is_large else 8320 * 2**10)


def _num_local_ranks(world_size: int) -> int:
    return int(os.environ.get("LOCAL_WORLD_SIZE", world_size))


def _limit() -> int | None:
    """That of this process's control group, if it has one."""
    text = _CGROUP.read_text().strip() if _CGROUP.exists() else "max"
    return None if text == "max" else int(text)
