"""Contexts around the collectives of this process and its waits for them, by axis of the mesh: to measure them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import asdict
from functools import partial
from typing import Any

import torch.distributed as dist

from lightning_3d.distributed.mesh import MeshShape
from lightning_3d.torch_internals.fsdp import waits_replaced
from lightning_3d.torch_internals.patches import replaced

Around = Callable[[str], AbstractContextManager[None]]
"""Name of the axes that a group of ranks is along -> the context of a collective."""

COLLECTIVES = (
    "all_gather_single",
    "all_to_all_single",
    "allgather",
    "allgather_coalesced",
    "allreduce",
    "allreduce_coalesced",
    "alltoall",
    "alltoall_base",
    "barrier",
    "broadcast",
    "gather",
    "recv",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_single",
    "scatter",
    "send",
)
"""The methods of a process group that communicate."""


def axes_of(group: dist.ProcessGroup, shape: MeshShape) -> str:
    """The axes along which the ranks of a group lie, as ``dp``, or ``pp_dp``."""
    places = [asdict(shape.coordinate(rank)) for rank in dist.get_process_group_ranks(group)]
    return "_".join(axis for axis in asdict(shape) if len({place[axis] for place in places}) > 1)


@contextmanager
def around_collectives(shape: MeshShape, around: Around) -> Iterator[None]:
    """Let Python's calls of collectives, and waits for them, run inside of ``around``; those of one rank as they are.

    Compiled code and C++ call collectives beneath this: those of functional collectives, as of DTensors.
    """
    names: dict[dist.ProcessGroup, str] = {}
    groups: dict[int, dist.ProcessGroup] = {}  # by the identity of what is waited for

    def run(group: dist.ProcessGroup, call: Callable[..., object], *args: object, **kwargs: object) -> object:
        name = names[group] if group in names else names.setdefault(group, axes_of(group, shape))
        if not name:
            return call(*args, **kwargs)
        with around(name):
            return call(*args, **kwargs)

    def measured(kind: str) -> Callable[..., object]:
        original = getattr(dist.ProcessGroup, kind)

        def collective(group: dist.ProcessGroup, *args: object, **kwargs: object) -> object:
            work = run(group, partial(original, group), *args, **kwargs)
            if work is not None:
                groups[id(work)] = group
            return work

        return collective

    wait_for = dist.Work.wait

    def wait(work: dist.Work, *args: Any, **kwargs: Any) -> object:
        call, group = partial(wait_for, work), groups.get(id(work))
        return call(*args, **kwargs) if group is None else run(group, call, *args, **kwargs)

    with ExitStack() as stack:
        stack.enter_context(
            replaced("measured collectives", dist.ProcessGroup, {kind: measured(kind) for kind in COLLECTIVES})
        )
        stack.enter_context(replaced("measured collectives", dist.Work, {"wait": wait}))
        stack.enter_context(waits_replaced(run))
        yield
