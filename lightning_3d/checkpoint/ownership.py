"""Who provides what: of the pipeline ranks that hold a value, the lowest one.

Most values live on one pipeline rank; tied parameters and parameters of glue live on several, equal but perhaps placed
differently, so that two ranks writing their parts of it would not fit together.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any, TypeVar

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

Key = TypeVar("Key", bound=Hashable)


def exchange(catalog: Mapping[Key, Any], pp: DeviceMesh | None) -> list[dict[Key, Any]]:
    """Every pipeline rank's catalog (what it holds, by key), in the order of ranks; a collective on the pp axis."""
    mine = dict(catalog)
    if pp is None:
        return [mine]
    catalogs: list[dict[Key, Any]] = [{}] * pp.size()
    dist.all_gather_object(catalogs, mine, group=pp.get_group())
    return catalogs


def owners(catalogs: Sequence[Mapping[Key, Any]]) -> dict[Key, int]:
    """The lowest pipeline rank that holds each key, ordered by rank; the same on all ranks."""
    holders: dict[Key, int] = {}
    for rank, catalog in enumerate(catalogs):
        for key in catalog:
            holders.setdefault(key, rank)
    return holders


def pipeline_rank(pp: DeviceMesh | None) -> int:
    """The index of this rank on the pp axis; 0 without one."""
    return 0 if pp is None else pp.get_local_rank()
