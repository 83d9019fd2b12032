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

from lightning_3d.torch_internals.modules import attributes_replaced

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
    with attributes_replaced(logging.getLogger("torch._subclasses.fake_tensor"), {"disabled": True}), mode:
        yield
