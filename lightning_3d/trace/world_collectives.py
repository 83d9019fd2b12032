"""Collectives over all ranks that a step calls by ``torch.distributed``: refused with a pipeline.

Only the stages that get to that line of the step would call them, each as often as it has microbatches; inline every
replica would count once for each of its ranks.
"""

from __future__ import annotations

import inspect
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist

from lightning_3d.errors import TraceError
from lightning_3d.model.block_runner import is_own
from lightning_3d.torch_internals.modules import attributes_replaced
from lightning_3d.trace.refusals import user_frame

_NAMES = (
    *("all_reduce", "reduce", "reduce_scatter", "reduce_scatter_tensor", "all_to_all", "all_to_all_single"),
    *("all_gather", "all_gather_into_tensor", "all_gather_object", "gather", "gather_object"),
    *("broadcast", "broadcast_object_list", "scatter", "scatter_object_list", "barrier"),
)


@contextmanager
def world_collectives_refused() -> Iterator[None]:
    """Raise inside for those that this thread calls."""
    thread = threading.get_ident()

    def refusing(name: str) -> Callable[..., Any]:
        call = getattr(dist, name)
        signature = inspect.signature(call)

        def refuse(*args: Any, **kwargs: Any) -> Any:
            group = signature.bind(*args, **kwargs).arguments.get("group")
            is_of_user = not is_own(sys._getframe(1).f_globals.get("__name__"))
            if is_of_user and threading.get_ident() == thread and (group is None or group is dist.group.WORLD):
                raise TraceError(
                    f"torch.distributed.{name} over all ranks was called in a step (at {user_frame()}), but with a"
                    " pipeline these are not one for each replica, and not every stage gets to each line of a step. Use"
                    " self.all_gather or self.trainer.strategy.reduce, which go over the replicas, or a hook."
                )
            return call(*args, **kwargs)

        return refuse

    with attributes_replaced(dist, {name: refusing(name) for name in _NAMES}):
        yield
