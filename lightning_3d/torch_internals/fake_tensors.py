"""Tensors that have a shape and no data, on which torch runs its operators all the same."""

from __future__ import annotations

import logging
from contextlib import AbstractContextManager

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
    "failures_unlogged",
    "unset_fake_temporarily",
]


def failures_unlogged() -> AbstractContextManager[None]:
    """Keep torch from logging operators that fail on fake tensors; they raise all the same."""
    return attributes_replaced(logging.getLogger("torch._subclasses.fake_tensor"), {"disabled": True})
