"""Assumed values, which a block's code reads in a run on fake tensors where it looks into data.

    .item(), bool(), .tolist()               0, False
    nonzero, where(mask), tensor[mask]       as many as the longest dim is long, as if every token had come

So blocks whose routing depends on data (mixtures of experts) can be planned. Only planning sees such values: the proof
of a plan and the training see the real ones. There all ranks of a tp group must read the same, as it decides which
collectives they make: such a block reads what the first rank has (`Interpreter`).
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_3d.errors import PlanError
from lightning_3d.sharding.rules.function import EXPERTS_MATMULS, Function, function_name
from lightning_3d.torch_internals.dispatch import (
    INDEX_PUT_IMPL,
    LOCAL_SCALAR_DENSE,
    UNIQUE2,
    OperatorMode,
    OpOverload,
)
from lightning_3d.torch_internals.fake_tensors import DataDependentOutputException, DynamicOutputShapeException

_aten = torch.ops.aten

_MAX_READS = 10_000
"""A loop that waits for a value which never comes ends here."""

_INDEXING = frozenset({_aten.index.Tensor, _aten.index_put.default, _aten.index_put_.default, INDEX_PUT_IMPL})


class AssumedValues(OperatorMode):
    """Active inside a ``FakeTensorMode``."""

    def __init__(self) -> None:
        super().__init__()
        self._num_reads = 0
        self.were_read = False
        """Whether anything was."""

    def __torch_dispatch__(
        self, func: OpOverload, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in _INDEXING:
            self.were_read |= any(index is not None and index.dtype == torch.bool for index in args[1])
            args = (args[0], _without_masks(args[1]), *args[2:])
        try:
            return func(*args, **(kwargs or {}))
        except (DataDependentOutputException, DynamicOutputShapeException):
            return self._assumed(func, args, kwargs or {})

    def _assumed(self, func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        self._num_reads += 1
        self.were_read = True
        if self._num_reads > _MAX_READS:
            raise PlanError(f"it reads more than {_MAX_READS} values of its data ({func})")
        tensor: Tensor = args[0]
        if func is LOCAL_SCALAR_DENSE:
            return _zero(tensor.dtype)
        if func is _aten.nonzero.default:
            return _nonzero(tensor)
        if func is _aten.masked_select.default:
            shape = torch.broadcast_shapes(tensor.shape, args[1].shape)
            return tensor.new_empty(max(shape, default=1))
        if func is _aten.bincount.default:
            return _bincount(*args, **kwargs)
        if func is UNIQUE2:
            return tensor.flatten(), tensor.to(torch.int64), tensor.flatten().to(torch.int64)
        raise PlanError(f"{func} depends on data")


def without_data(function: Function) -> Function:
    """A function with the same shapes and history that takes fake tensors; any other function as it is.

    torch 2.13 has no rule for fake tensors of ``grouped_mm`` in fp32.
    """
    if function is Tensor.tolist:
        return tolist
    return grouped_mm if function_name(function) in EXPERTS_MATMULS else function


def grouped_mm(input: Tensor, weight: Tensor, *args: object, **kwargs: object) -> Tensor:
    """The product with the first expert: what ``F.grouped_mm`` gives, but for the numbers."""
    if (input.dim(), weight.dim()) != (2, 3):
        raise NotImplementedError(f"grouped_mm of {list(input.shape)} and {list(weight.shape)} on fake tensors")
    return input @ weight[0]


def tolist(tensor: Tensor) -> Any:
    """Zeros in place of ``tensor.tolist()``, which takes no subclasses of tensors."""
    values: object = tensor.new_empty(()).item()  # assumed, and so noted, once for all
    for length in reversed(tensor.shape):
        values = [copy.copy(values) for _ in range(length)]
    return values


def _zero(dtype: torch.dtype) -> bool | int | float:
    if dtype == torch.bool:
        return False
    return 0.0 if dtype.is_floating_point else 0


def _nonzero(mask: Tensor) -> Tensor:
    return mask.new_zeros((max(mask.shape, default=1), mask.dim()), dtype=torch.int64)


def _bincount(values: Tensor, weights: Tensor | None = None, minlength: int = 0) -> Tensor:
    return values.new_zeros(max(minlength, 1), dtype=torch.int64 if weights is None else weights.dtype)


def _without_masks(indices: Sequence[Tensor | None]) -> list[Tensor | None]:
    """Indices with the places of a mask's elements in place of the mask."""
    places: list[Tensor | None] = []
    for index in indices:
        if index is not None and index.dtype == torch.bool:
            places.extend(_nonzero(index).unbind(1))
        else:
            places.append(index)
    return places
