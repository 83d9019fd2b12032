"""Running a block without leaving a trace on it: planning and proving run blocks before training does."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn


@contextmanager
def preserved(block: nn.Module) -> Iterator[None]:
    """Put every attribute of the block's modules back afterwards: parameters, buffers, caches, training flags.

    Covers attributes that are set or removed, and buffers that are changed in place. What a forward changes inside an
    object that an attribute refers to (it appends to a list) stays changed.
    """
    saved = [(module, _attributes(module)) for module in block.modules()]
    values = [(buffer, buffer.detach().clone()) for buffer in block.buffers()]
    try:
        yield
    finally:
        for module, attributes in saved:
            vars(module).clear()
            vars(module).update(attributes)
        for buffer, value in values:
            buffer.detach().copy_(value)


def _attributes(module: nn.Module) -> dict[str, Any]:
    return {name: dict(value) if type(value) is dict else value for name, value in vars(module).items()}
