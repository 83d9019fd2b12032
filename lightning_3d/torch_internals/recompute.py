"""Activation checkpoints: what ``torch.utils.checkpoint`` does in the forward, and runs again in the backward.

Function modes see neither. The generator behind non-reentrant checkpoints is the one place to step in; reentrant ones
are an autograd function (``autograd_functions.py``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch.utils.checkpoint
from torch.utils.checkpoint import _StopRecomputationError

Function = Callable[..., Any]
Generator = Callable[..., Iterator[None]]
"""Called with the function and its arguments; the function runs in the forward where it yields."""

StopRecomputation = _StopRecomputationError
"""Leaves a forward that runs again, on all ranks alike, once it has what the backward needs."""


@contextmanager
def checkpoints_replaced(replace: Callable[[Generator], Generator]) -> Iterator[None]:
    """Make non-reentrant checkpoints inside by ``replace(the present generator)``."""
    checkpoints = torch.utils.checkpoint
    present = checkpoints._checkpoint_without_reentrant_generator
    checkpoints._checkpoint_without_reentrant_generator = replace(present)
    try:
        yield
    finally:
        checkpoints._checkpoint_without_reentrant_generator = present


@contextmanager
def recomputed_by(again: Callable[[Function], Function]) -> Iterator[None]:
    """Let checkpoints that are made inside recompute ``again(function)`` in place of a function.

    In their backward the modes of the block's forward have long ended; ``again`` starts them anew.
    """

    def replace(present: Generator) -> Generator:
        def generator(function: Function, *args: Any, **kwargs: Any) -> Iterator[None]:
            yield from present(again(function), *args, **kwargs)

        return generator

    with checkpoints_replaced(replace):
        yield


def is_reentrant(cls: type[torch.autograd.Function]) -> bool:
    """Whether an autograd function is a checkpoint; its first argument is the function."""
    return cls is torch.utils.checkpoint.CheckpointFunction
