"""Collectives that a step calls by ``torch.distributed``: refused in microbatches.

Only the stages that get to that line of the step would call them, each as often as it has microbatches.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager

from lightning_3d.distributed.replica_world import COLLECTIVES, is_users
from lightning_3d.errors import TraceError
from lightning_3d.torch_internals.function_calls import calls_answered
from lightning_3d.trace.refusals import user_frame


def world_collectives_refused() -> AbstractContextManager[None]:
    """Raise inside for those that this thread calls."""
    thread = threading.get_ident()

    def refuse(
        caller: str, original: Callable[..., object], args: tuple[object, ...], kwargs: dict[str, object]
    ) -> object:
        if threading.get_ident() == thread and is_users(caller):
            raise TraceError(
                f"torch.distributed.{original.__name__} was called in a step (at {user_frame()}),"
                " but in microbatches not every stage gets to each line of it, and those that do for each microbatch."
                " Use self.all_gather or self.trainer.strategy.reduce, or a hook, or pipeline.mode=inline, where"
                " it goes over the replicas."
            )
        return original(*args, **kwargs)

    return calls_answered(COLLECTIVES, refuse)
