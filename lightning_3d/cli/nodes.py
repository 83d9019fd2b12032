"""``lightning-3d doctor --nodes``: what all nodes of a job have, and what will not work on them together.

A launcher starts it on every node as it will start the training. The first process of each node looks at it:

    node 0    versions, clock, limits, room in the folder of checkpoints, whether it is one folder   -> a table
    node 1    the same                                                                               -> problems
"""

from __future__ import annotations

import resource
import shutil
import socket
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from uuid import uuid4

import torch
import torch.distributed as dist
from lightning.fabric.plugins import ClusterEnvironment
from lightning.fabric.plugins.environments.slurm import SLURMEnvironment
from lightning.fabric.plugins.environments.torchelastic import TorchElasticEnvironment
from rich.console import Group
from rich.table import Table

from lightning_3d.checkpoint.atomic import NOT_SHARED, is_seen
from lightning_3d.cli.output import show
from lightning_3d.distributed.agreement import gather_objects, on_one_rank, raise_on_all_ranks
from lightning_3d.distributed.machine import Network
from lightning_3d.distributed.objects import default_backends
from lightning_3d.distributed.speed import measured_machine
from lightning_3d.errors import ConfigError
from lightning_3d.memory.rank_memory import GIB, size_text
from lightning_3d.torch_internals.lightning_helpers import connect

_CLOCKS = 1.0  # seconds that clocks may differ by: lines of logs, and what is the newest checkpoint, go by them
_FILES = 4096  # that a process may open: sockets to other ranks, shared memory of workers
_ROOM = 16 * GIB
_TIMEOUT = timedelta(minutes=2)


@dataclass(frozen=True, kw_only=True)
class Node:
    """A node, as its first process finds it."""

    name: str
    versions: Mapping[str, str]
    clock: float
    """Seconds since 1970, at the same moment on all nodes."""
    num_files: int
    """That a process may open."""
    room: int
    """Bytes that are free in the folder."""
    sees_folder: bool
    """Whether what the first node writes to the folder is there."""


def run(folder: Path, versions: Mapping[str, str]) -> None:
    """Print the tables and the problems on rank 0, which exits with 1 where there are some.

    Args:
        folder: Of checkpoints.
        versions: Of this node's packages.

    Raises:
        ConfigError: no launcher has started it.
    """
    environment = _environment()
    device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    if device.type != "cpu":
        device = torch.device(device.type, environment.local_rank())
        torch.accelerator.set_device_index(device)
    connect(environment, default_backends(device), timeout=_TIMEOUT)
    found = _look(folder, versions)
    nodes = [node for node in gather_objects(found if environment.local_rank() == 0 else None) if node is not None]
    per_node = dist.get_world_size() // len(nodes)
    machine = measured_machine(device, torch.float32, per_node)
    problems = list(problems_of(nodes, folder))
    is_first = dist.get_rank() == 0
    if is_first:
        links = {"in a node": machine.inside} if per_node > 1 else {}
        links |= {"between nodes": machine.between} if len(nodes) > 1 else {}
        show(Group(_table(nodes), _table_of_links(links), *(f"problem: {each}" for each in problems or ["none"])))
    dist.destroy_process_group()
    if problems and is_first:
        raise SystemExit(1)


def _environment() -> ClusterEnvironment:
    for kind in (TorchElasticEnvironment, SLURMEnvironment):
        if kind.detect():
            return kind()
    raise ConfigError(
        "doctor --nodes is for all nodes of a job: start it by the launcher of the training, as `torchrun --nnodes=2"
        " ... --no-python lightning-3d doctor --nodes` or `srun lightning-3d doctor --nodes`"
    )


def _look(folder: Path, versions: Mapping[str, str]) -> Node:
    token = on_one_rank(lambda: uuid4().hex)
    probe = folder / f".doctor-{token}"
    with raise_on_all_ranks():
        folder.mkdir(parents=True, exist_ok=True)
    if dist.get_rank() == 0:
        probe.touch()
    dist.barrier()
    clock = time.time()
    sees_folder = is_seen(probe)
    dist.barrier()
    if dist.get_rank() == 0:
        probe.unlink()
    return Node(
        name=socket.gethostname(),
        versions=versions,
        clock=clock,
        num_files=resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        room=shutil.disk_usage(folder).free,
        sees_folder=sees_folder,
    )


def problems_of(nodes: Sequence[Node], folder: Path) -> Iterator[str]:
    """Problems of these nodes together, a line each.

    Args:
        folder: Of checkpoints, that they have looked at.
    """
    first = nodes[0]
    for package in sorted({name for node in nodes for name in node.versions}):
        having = {node.name: node.versions.get(package, "none") for node in nodes}
        if len(set(having.values())) > 1:
            listed = ", ".join(f"{version} on {name}" for name, version in having.items())
            yield f"{package} is not the same on all nodes ({listed}): install the same version"
    middle = statistics.median(node.clock for node in nodes)
    for node in nodes:
        if abs(node.clock - middle) > _CLOCKS:
            yield f"the clock of {node.name} is {node.clock - middle:+.1f} s from the others': set it, as by NTP"
        if not node.sees_folder:
            yield f"{node.name} does not see what {first.name} writes to {folder}: {NOT_SHARED}"
        if node.room < _ROOM:
            yield f"{node.name} has {size_text(node.room)} left in {folder}: a checkpoint may not fit"
        if node.num_files < _FILES:
            yield f"a process of {node.name} may open {node.num_files} files: raise `ulimit -n` to {_FILES} or more"


def _table(nodes: Sequence[Node]) -> Table:
    table = Table("node", "torch", "clock", "open files", "room", "shared folder")
    for node in nodes:
        clock, shared = f"{node.clock - nodes[0].clock:+.2f} s", "yes" if node.sees_folder else "no"
        table.add_row(node.name, node.versions.get("torch"), clock, str(node.num_files), size_text(node.room), shared)
    return table


def _table_of_links(links: Mapping[str, Network]) -> Table:
    """The slowest of all ranks, as all use them at once."""
    table = Table("links", "collective", "GB/s", "latency")
    for where, network in links.items():
        for kind, link in network.items():
            table.add_row(where, kind, f"{link.bandwidth / 1e9:.2f}", f"{1e6 * link.latency:.0f} us")
    return table
