"""Tensors that have a shape and no data, on which torch runs its operators all the same."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    unset_fake_temporarily,
)
from torch._subclasses.functional_tensor import FunctionalTensor

__all__ = [
    "DataDependentOutputException",
    "DynamicOutputShapeException",
    "FakeTensor",
    "FakeTensorMode",
    "FunctionalTensor",
    "on_fake_tensors",
    "unset_fake_temporarily",
]


@contextmanager
def on_fake_tensors(mode: FakeTensorMode) -> Iterator[None]:
    """Compute on fake tensors. Operators that fail on them raise; torch would log the traceback of each besides."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    logger.addFilter(_nothing)
    try:
        with mode:
            yield
    finally:
        logger.removeFilter(_nothing)


def _nothing(record: logging.LogRecord) -> bool:
    """A filter that lets no record through."""
    return False
