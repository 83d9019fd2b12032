"""Joining what the microbatches of a batch gave to what the whole batch would have given.

    rows (of samples, tokens)      concatenated
    floating point                 mean, weighted by samples: what an average is; or as the study of the loss found
    integers                       kept if constant, else the sum: see ``evidence.py``
    anything else                  must be equal

Rows are tensors of which a dimension is the number of samples, or the same multiple of it, in every microbatch, and
lists whose length is the number of samples. Whether another dimension than 0 counts samples shows in microbatches of
two sizes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import reduce
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from lightning_3d.errors import StepError
from lightning_3d.pipeline.effects.evidence import Evidence, Number, is_zero, unknown_number

Average = Literal["samples", "loss", "sum"]
"""Weights of a sum over microbatches: their samples, those of their losses, or 1."""


class Joiner:
    """Joins values that have the same meaning in each microbatch, and learns from them what they mean.

    In all methods ``values`` has one entry per microbatch, of ``sizes`` samples, and ``name`` says what it is and where
    (for errors, and to learn of later ones).
    """

    def __init__(self) -> None:
        self.evidence = Evidence()
        self.averages: Mapping[str, Average] = {}
        """How floating-point values are joined, by name; else by samples."""
        self.loss_weights: Sequence[float] = ()
        """The factors of the present microbatches' losses in that of the batch."""

    def join(self, values: Sequence[Any], sizes: Sequence[int], name: str) -> Any:
        """Join tensors, numbers, strings, None, and containers of them.

        Raises:
            StepError: the values differ in structure, or differ and are neither tensors nor numbers.
        """
        first = values[0]
        if len(values) == 1:
            return first
        if any(type(value) is not type(first) for value in values):
            raise _differ(name, values)
        if isinstance(first, Tensor):
            return self._tensors(values, sizes, name)
        if isinstance(first, np.ndarray):
            return self._tensors([torch.from_numpy(value) for value in values], sizes, name).numpy()
        if isinstance(first, Mapping):
            return self._mappings(values, sizes, name)
        if isinstance(first, (list, tuple)):
            return self._sequences(values, sizes, name)
        if dataclasses.is_dataclass(first) and not isinstance(first, type):
            fields = [field.name for field in dataclasses.fields(first)]
            joined = {
                field: self.join([getattr(v, field) for v in values], sizes, f"{name}.{field}") for field in fields
            }
            return dataclasses.replace(first, **joined)
        if isinstance(first, float):
            return self.average(values, sizes, name).item()
        if type(first) is int:
            return self.number(values, sizes, name, counts=False)
        return _equal(values, name)

    @contextmanager
    def averaging_by_samples(self) -> Iterator[None]:
        """Join other values inside than those of the present microbatches."""
        averages, self.averages = self.averages, {}
        try:
            yield
        finally:
            self.averages = averages

    def average(self, values: Sequence[Tensor | float], counts: Sequence[int], name: str) -> Tensor:
        """Join floating-point values, tensors of equal shape or numbers.

        Args:
            counts: Samples in each microbatch, or of what the value is an average.
        """
        if len(values) == 1:
            return torch.as_tensor(values[0])
        return averaged(values, counts, self.loss_weights, self.averages.get(name, "samples"))

    def extreme(self, values: Sequence[Tensor | float], name: str, *, largest: bool) -> Tensor:
        """The largest or the smallest of these values."""
        stacked = torch.stack([torch.as_tensor(value) for value in values])
        return stacked.amax(0) if largest else stacked.amin(0)

    def number(self, values: Sequence[Number], sizes: Sequence[int], name: str, *, counts: bool = True) -> Any:
        """Join numbers or tensors of equal shape that are constant, or of which the batch has the sum.

        Args:
            counts: Whether values that neither are equal nor grow with the number of samples are counts, not an error.

        Raises:
            StepError: which of the two is unknown.
        """
        if len(values) == 1 or all(map(is_zero, values)):
            return values[0]
        kind = self.evidence.kind(values, sizes, name)
        if kind is None:
            raise unknown_number(values, sizes, name)
        if kind == "count" and not counts:
            raise _differ(name, values)
        return values[0] if kind == "constant" else sum(values)

    def total(self, values: Sequence[Number], sizes: Sequence[int], name: str) -> Any:
        """The sum of values that are to be summed over batches, unless they are known to be a constant of the batch."""
        if len(values) == 1 or all(map(is_zero, values)):
            return values[0]
        return values[0] if self.evidence.kind(values, sizes, name) == "constant" else sum(values)

    def are_rows(self, values: Sequence[Sequence[Any]], sizes: Sequence[int], name: str, *, unknown: bool) -> bool:
        """Whether these are lists with one entry for each sample, rather than structures of parts for the whole batch.

        Args:
            unknown: What holds if that does not show.
        """
        are_rows = self.evidence.are_rows(values, sizes, name, unknown=unknown)
        if not are_rows or any(len(value) != size for value, size in zip(values, sizes, strict=True)):
            return False
        entries = [(entry, size) for value, size in zip(values, sizes, strict=True) for entry in value]
        parts = [
            isinstance(e, (list, tuple)) or (isinstance(e, Tensor) and e.ndim > 0 and len(e) == n) for e, n in entries
        ]
        return not any(parts)

    def _tensors(self, tensors: Sequence[Tensor], sizes: Sequence[int], name: str) -> Tensor:
        first = tensors[0]
        dim = self.evidence.row_dim(tensors, sizes, name)
        if dim is not None:
            return torch.cat(list(tensors), dim)
        if any(tensor.shape != first.shape for tensor in tensors):
            raise _differ(name, [tuple(tensor.shape) for tensor in tensors], "shapes")
        if first.is_floating_point() or first.is_complex():
            return self.average(tensors, sizes, name)
        if first.dtype != torch.bool:
            return self.number(tensors, sizes, name)  # type: ignore[no-any-return]
        return _equal(tensors, name)  # type: ignore[no-any-return]

    def _mappings(self, values: Sequence[Any], sizes: Sequence[int], name: str) -> Any:
        first = values[0]
        if any(value.keys() != first.keys() for value in values):
            raise _differ(name, [sorted(map(str, value)) for value in values], "keys")
        joined = {key: self.join([value[key] for value in values], sizes, f"{name}[{key!r}]") for key in first}
        return joined if type(first) is dict else type(first)(joined)

    def _sequences(self, values: Sequence[Any], sizes: Sequence[int], name: str) -> Any:
        first = values[0]
        if isinstance(first, tuple) and type(first) is not tuple:  # a NamedTuple
            return type(first)(*self._sequences([tuple(value) for value in values], sizes, name))
        if self.are_rows(values, sizes, name, unknown=True):
            return type(first)(entry for value in values for entry in value)
        if any(len(value) != len(first) for value in values):
            raise _differ(name, [len(value) for value in values], "lengths")
        columns = enumerate(zip(*values, strict=True))
        return type(first)(self.join(entries, sizes, f"{name}[{i}]") for i, entries in columns)


def averaged(
    values: Sequence[Tensor | float], counts: Sequence[int], loss_weights: Sequence[float], how: Average
) -> Tensor:
    """Join tensors of equal shape or numbers, in their dtype if that is floating point.

    Those of microbatches that weigh nothing may be anything.
    """
    tensors = [torch.as_tensor(value) for value in values]
    dtype = reduce(torch.promote_types, (tensor.dtype for tensor in tensors))
    dtype = dtype if dtype.is_floating_point or dtype.is_complex else torch.get_default_dtype()
    weights: Sequence[float] = [1.0] * len(tensors)
    if how == "samples":
        weights = [count / sum(counts) for count in counts]
    elif how == "loss":
        weights = loss_weights
    joined = torch.zeros_like(tensors[0], dtype=torch.promote_types(dtype, torch.float64))
    for tensor, weight in zip(tensors, weights, strict=True):
        if weight != 0:
            joined.add_(tensor, alpha=weight)
    return joined.to(dtype)


def _equal(values: Sequence[Any], name: str) -> Any:
    first = values[0]
    if not all(
        value is first or bool(torch.equal(value, first) if isinstance(value, Tensor) else value == first)
        for value in values
    ):
        raise _differ(name, values)
    return first


def _differ(name: str, values: Sequence[Any], what: str = "values") -> StepError:
    shown = ", ".join(f"{value!r:.60}" for value in values[:4])
    return StepError(
        f"With a pipeline a step runs once for each of {len(values)} microbatches, and {name} has {what} there that"
        f" can't be joined to those of the whole batch: {shown}. What joins: tensors and lists with an entry per sample"
        " (concatenated), floating-point values (averaged), integer tensors (summed unless"
        " constant), numbers of samples (summed), equal values."
    )
