"""Traces of all pipeline stages are compared, as a tensor that one sends and the other does not expect would hang."""

from __future__ import annotations

from itertools import zip_longest

import torch.distributed as dist

from lightning_3d.errors import TraceError
from lightning_3d.trace.trace import Trace

_END = "the end of the step"


def check_alike(trace: Trace, name: str, group: dist.ProcessGroup) -> None:
    """Raise where ranks of a pipeline trace other calls of a step; each calls it with its new trace.

    Args:
        name: The step.

    Raises:
        TraceError: on all of these ranks.
    """
    own = [f"{call.name} (at {call.where}) giving {_shapes(trace, call.outputs)}" for call in trace.calls]
    everyone: list[list[str]] = [own] * dist.get_world_size(group)
    dist.all_gather_object(everyone, own, group=group)
    for rank, other in enumerate(everyone):
        for i, (expected, found) in enumerate(zip_longest(everyone[0], other, fillvalue=_END)):
            if expected != found:
                raise TraceError(
                    f"{name} takes another path on pipeline stage {rank} than on stage 0: its call {i + 1} of or after"
                    f" blocks is {found}, where stage 0 has {expected}. Code outside of blocks has to do the same on"
                    " every rank."
                )


def _shapes(trace: Trace, ids: tuple[int, ...]) -> list[tuple[int, ...]]:
    return [trace.tensors[i].shape for i in ids]
