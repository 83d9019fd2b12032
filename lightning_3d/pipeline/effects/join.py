"""Joining what the microbatches of a batch gave to what the whole batch would have given.

    rows (of samples, tokens)      concatenated
    floating point                 mean, weighted by samples: what a loss or an average is
    integer tensors                sum: what a count is
    anything else                  must be equal

Rows are tensors whose dimension 0 is the number of samples, or the same multiple of it, in every microbatch, and lists
whose length is the number of samples. A sum in floating point can't be told from a mean and is averaged.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_3d.errors import StepError


def join(values: Sequence[Any], sizes: Sequence[int], name: str) -> Any:
    """Join values that have the same meaning in each microbatch.

    Args:
        values: One per microbatch; tensors, numbers, strings, None, and containers of them.
        sizes: Samples in each microbatch.
        name: For errors: what it is, and where in it.

    Raises:
        StepError: the values differ in structure, or differ and are neither tensors nor numbers.
    """
    first = values[0]
    if len(values) == 1:
        return first
    if any(type(value) is not type(first) for value in values):
        raise _differ(name, values)
    if isinstance(first, Tensor):
        return _join_tensors(values, sizes, name)
    if isinstance(first, np.ndarray):
        return _join_tensors([torch.from_numpy(value) for value in values], sizes, name).numpy()
    if isinstance(first, Mapping):
        return _join_mappings(values, sizes, name)
    if isinstance(first, (list, tuple)):
        return _join_sequences(values, sizes, name)
    if dataclasses.is_dataclass(first) and not isinstance(first, type):
        fields = [field.name for field in dataclasses.fields(first)]
        joined = {field: join([getattr(v, field) for v in values], sizes, f"{name}.{field}") for field in fields}
        return dataclasses.replace(first, **joined)
    if isinstance(first, float):
        return weighted_mean(values, sizes).item()
    return _equal(values, sizes, name)


def weighted_mean(values: Sequence[Tensor | float], weights: Sequence[int]) -> Tensor:
    """Mean over microbatches of tensors of equal shape or numbers, in their dtype if that is floating point."""
    stacked = torch.stack([torch.as_tensor(value) for value in values])
    dtype = stacked.dtype if stacked.is_floating_point() or stacked.is_complex() else torch.get_default_dtype()
    shares = torch.tensor(weights, device=stacked.device, dtype=torch.float64) / sum(weights)
    wide = stacked if stacked.is_complex() else stacked.double()
    mean: Tensor = torch.tensordot(shares.to(wide.dtype), wide, dims=1)
    return mean.to(dtype)


def _join_tensors(tensors: Sequence[Tensor], sizes: Sequence[int], name: str) -> Tensor:
    first = tensors[0]
    if _have_rows(tensors, sizes):
        return torch.cat(list(tensors))
    if any(tensor.shape != first.shape for tensor in tensors):
        raise _differ(name, [tuple(tensor.shape) for tensor in tensors], "shapes")
    if first.is_floating_point() or first.is_complex():
        return weighted_mean(tensors, sizes)
    if first.dtype != torch.bool:
        return torch.stack(list(tensors)).sum(0)
    return _equal(tensors, sizes, name)  # type: ignore[no-any-return]


def _have_rows(tensors: Sequence[Tensor], sizes: Sequence[int]) -> bool:
    if any(tensor.ndim == 0 or len(tensor) == 0 for tensor in tensors):
        return False
    per_sample = [divmod(len(tensor), size) for tensor, size in zip(tensors, sizes, strict=True)]
    return len(set(per_sample)) == 1 and per_sample[0][1] == 0


def _join_mappings(values: Sequence[Any], sizes: Sequence[int], name: str) -> Any:
    first = values[0]
    if any(value.keys() != first.keys() for value in values):
        raise _differ(name, [sorted(map(str, value)) for value in values], "keys")
    joined = {key: join([value[key] for value in values], sizes, f"{name}[{key!r}]") for key in first}
    return joined if type(first) is dict else type(first)(joined)


def _join_sequences(values: Sequence[Any], sizes: Sequence[int], name: str) -> Any:
    first = values[0]
    if isinstance(first, tuple) and type(first) is not tuple:  # a NamedTuple
        return type(first)(*_join_sequences([tuple(value) for value in values], sizes, name))
    if are_rows(values, sizes):
        return type(first)(entry for value in values for entry in value)
    if any(len(value) != len(first) for value in values):
        raise _differ(name, [len(value) for value in values], "lengths")
    return type(first)(join(entries, sizes, f"{name}[{i}]") for i, entries in enumerate(zip(*values, strict=True)))


def are_rows(values: Sequence[Sequence[Any]], sizes: Sequence[int]) -> bool:
    """Whether these are lists with one entry for each sample, rather than structures of parts for the whole batch."""
    if any(len(value) != size for value, size in zip(values, sizes, strict=True)):
        return False
    entries = [(entry, size) for value, size in zip(values, sizes, strict=True) for entry in value]
    parts = [isinstance(e, (list, tuple)) or (isinstance(e, Tensor) and e.ndim > 0 and len(e) == n) for e, n in entries]
    return not any(parts)


def _equal(values: Sequence[Any], sizes: Sequence[int], name: str) -> Any:
    if type(values[0]) is int and list(values) == list(sizes) and len(set(sizes)) > 1:  # a number of samples
        return sum(sizes)
    equal = [
        value is values[0] or bool(torch.equal(value, values[0]) if isinstance(value, Tensor) else value == values[0])
        for value in values
    ]
    if not all(equal):
        raise _differ(name, values)
    return values[0]


def _differ(name: str, values: Sequence[Any], what: str = "values") -> StepError:
    shown = ", ".join(f"{value!r:.60}" for value in values[:4])
    return StepError(
        f"With a pipeline a step runs once for each of {len(values)} microbatches, and {name} has {what} there that"
        f" can't be joined to those of the whole batch: {shown}. What joins: tensors and lists with an entry per sample"
        " (concatenated), floating-point values (averaged), integer tensors (summed), equal values."
    )
