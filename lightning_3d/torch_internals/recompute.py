"""Activation checkpoints inside of a block: what their backward runs again runs on shards, too.

Owns a workaround for torch 2.13: both kinds of ``torch.utils.checkpoint`` call the function a second time in the
backward, when the modes of the block's forward have long ended. The generator behind non-reentrant checkpoints, and the
autograd function of reentrant ones, get the function in a form that starts them again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch.utils.checkpoint

Function = Callable[..., Any]


@contextmanager
def recomputed_by(again: Callable[[Function], Function]) -> Iterator[None]:
    """Let checkpoints that are made inside recompute ``again(function)`` in place of a function."""
    checkpoints = torch.utils.checkpoint
    present = checkpoints._checkpoint_without_reentrant_generator

    def generator(function: Function, *args: Any, **kwargs: Any) -> Iterator[None]:
        yield from present(again(function), *args, **kwargs)

    checkpoints._checkpoint_without_reentrant_generator = generator  # type: ignore[assignment]  # passes on all others
    try:
        yield
    finally:
        checkpoints._checkpoint_without_reentrant_generator = present


def is_reentrant(cls: type[torch.autograd.Function]) -> bool:
    """Whether an autograd function is a checkpoint; its first argument is the function."""
    return cls is torch.utils.checkpoint.CheckpointFunction
