"""The default process group's store, and the threads that gloo's groups run collectives in, which torch keeps private.

torch gives a gloo group two threads. After each collective a thread writes its name into a string of the group,
without a lock (``lastCompletedWorkName`` in ``ProcessGroupGloo::runLoop``). Names of more than 15 characters lie in
memory of their own, and ``ALLGATHER_COALESCED`` is what functional collectives and DTensors gather by. So two threads
that end collectives at the same time may free that memory twice, or write where it was: the process crashes, now or
later, by "malloc(): unaligned tcache chunk detected" or the like.

All ranks run the collectives of a group in the same order, so one thread can run them, too.

Each device of gloo's has a thread besides, which looks at its sockets a hundred times a second, also when nothing is
sent; so the groups of a process share their devices, as gloo lets contexts do.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from datetime import timedelta
from functools import cache
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import _ProcessGroupWrapper
from torch.distributed import PrefixStore, Store, distributed_c10d  # type: ignore[attr-defined]  # public
from torch.distributed.distributed_c10d import ProcessGroupGloo, _get_default_store

from lightning_3d.torch_internals.patches import replaced

abort_process_group = distributed_c10d._abort_process_group
"""Ends all groups without waiting for other ranks, as NCCL can."""

object_device = distributed_c10d._get_object_coll_device
"""The type of the device by which a group exchanges objects: that of CPUs where it has a backend for them."""

HIDDEN_COLLECTIVES: frozenset[Callable[..., object]] = frozenset(
    {distributed_c10d._all_gather_base, distributed_c10d._reduce_scatter_base}
)
"""Collectives that torch's norms, differentiable collectives and older packages call in place of public ones."""

_clients: WeakKeyDictionary[dist.ProcessGroup, Store] = WeakKeyDictionary()


def further_store(name: str) -> Store:
    """A client of the default process group's store, apart from the one of the group, with names of its own.

    It is one per group, whatever the names: each would hold a socket here and one on rank 0 until it is collected.

    Args:
        name: Goes before each name.
    """
    group = dist.group.WORLD
    assert group is not None
    if group not in _clients:
        _clients[group] = _get_default_store().clone()  # type: ignore[attr-defined]  # not in its stub
    return PrefixStore(name, _clients[group])


@cache
def _shared_devices(interfaces: str, process: int) -> Sequence[object]:
    """The devices of all groups of a process; a fork has its own, as threads do not go along with it.

    Args:
        interfaces: Names of networks, separated by commas; empty for that of the host's name.
    """
    devices = [ProcessGroupGloo.create_device(interface=name) for name in interfaces.split(",") if name]
    return devices or [ProcessGroupGloo.create_default_device()]


class _OneThread(ProcessGroupGloo):
    """A gloo group as torch makes it, but for the number of its threads.

    Args:
        further: What torch passes since 2.14, by the names that options have for it.
    """

    def __init__(self, store: Store, rank: int, size: int, timeout: timedelta, **further: object) -> None:
        options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # not in its stub, as its attributes
        options._devices = _shared_devices(os.environ.get("GLOO_SOCKET_IFNAME", ""), os.getpid())
        options._timeout = timeout
        options._threads = 1
        for name, value in further.items():
            setattr(options, name, value)
        super().__init__(store, rank, size, options)


def one_gloo_thread() -> AbstractContextManager[None]:
    """Let gloo groups that are made inside run their collectives in one thread each."""
    return replaced("gloo threads", distributed_c10d, {"ProcessGroupGloo": _OneThread})


def num_gloo_threads(group: dist.ProcessGroup, device_type: str) -> int:
    """The number of threads in which gloo runs a group's collectives of tensors on a device; 0 for other backends."""
    backend = group._get_backend(torch.device(device_type))
    if isinstance(backend, _ProcessGroupWrapper):  # of TORCH_DISTRIBUTED_DEBUG=DETAIL
        backend = backend.wrapped_pg
    return backend.options._threads if isinstance(backend, ProcessGroupGloo) else 0  # type: ignore[attr-defined]
