"""Telling by evidence whether a number counts or is constant.

An integer that is 4 in every microbatch of 4 samples may count samples (16 in a batch of 16) or be a constant (4). What
it is shows where microbatches differ in size:

    sizes 4, 3, 5    values 4, 3, 5    samples: the batch has their sum
                     values 2, 2, 2    constant: the batch has 2
                     values 1, 3, 2    count of something in the data: the batch has their sum

So when a number is not known yet, the step runs once more, on microbatches of two sizes with random outputs of blocks
(``study.py``). What shows once holds for later steps. Likewise for tensors: rows
are as many as samples, or the same multiple of it, whatever the size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence, Sized
from typing import Any, Literal

import torch
from torch import Tensor

from lightning_3d.errors import StepError

Number = int | float | Tensor
_Kind = Literal["constant", "samples", "count"]


class Evidence:
    """Remembers by name which values are constant, which are counts, and which are rows."""

    def __init__(self) -> None:
        self.study: Callable[[], None] | None = None
        """Called at most once, to show more of the numbers that the present step gives."""
        self._kinds: dict[str, _Kind] = {}
        self._are_rows: dict[str, bool] = {}
        self._row_dims: dict[str, int | None] = {}
        self._kept: set[str] = set()  # names whose equal values were taken for constant

    def kind(self, values: Sequence[Number], sizes: Sequence[int], name: str) -> _Kind | None:
        """Tell what values mean: the batch has the same, if constant, else their sum. None if unknown.

        Args:
            values: One per microbatch, tensors of equal shape or numbers; not all zero, which shows nothing.
            sizes: Samples in each microbatch.
            name: What and where it is, equal in every step.

        Raises:
            StepError: it differs, and was taken for a constant in an earlier step.
        """
        shown = _shown(values, sizes)
        if shown in (None, "constant") and name not in self._kinds:
            self._learn()
        known = self._kinds.get(name)
        kind = shown if known is None else known
        if kind is not None:
            self._kinds[name] = kind = kind if shown in (None, kind) else "count"
        if kind == "count" and name in self._kept:
            raise StepError(
                f"{name} was the same in all microbatches of earlier batches, and taken for a constant, but now it is"
                f" {_listed(values)}. {_FIX}"
            )
        if kind == "constant" and len(set(sizes)) == 1:
            self._kept.add(name)
        return kind

    def row_dim(self, tensors: Sequence[Tensor], sizes: Sequence[int], name: str) -> int | None:
        """The dimension in which tensors have entries for each sample, as many for all; None if they have none."""
        later = self._later_row_dim([tensor.shape for tensor in tensors], sizes, name)
        if later is not None or any(tensor.ndim == 0 for tensor in tensors):
            return later
        return 0 if self.are_rows(tensors, sizes, name, unknown=True) else None

    def _later_row_dim(self, shapes: Sequence[torch.Size], sizes: Sequence[int], name: str) -> int | None:
        """As ``row_dim``, but for the first dimension (time first, or layers, and then samples)."""
        if len({len(shape) for shape in shapes}) > 1:
            return None
        lengths = list(zip(*shapes, strict=True))  # by dimension
        fitting = [dim for dim, of_dim in enumerate(lengths) if _are_proportional(of_dim, sizes)]
        later = [dim for dim in fitting if dim > 0]
        if len(set(sizes)) > 1:
            differing = [dim for dim, of_dim in enumerate(lengths) if len(set(of_dim)) > 1]
            self._row_dims[name] = differing[0] if len(differing) == 1 and differing == fitting else None
        elif name not in self._row_dims and (
            (later and 0 not in fitting) or any(lengths[dim][0] == sizes[0] for dim in later)
        ):
            self._learn()
        found = self._row_dims.get(name)
        return found if found in later else None

    def are_rows(self, values: Sequence[Sized], sizes: Sequence[int], name: str, *, unknown: bool) -> bool:
        """Whether tensors or lists have entries for each sample, as many for all.

        Args:
            values: One per microbatch.
            unknown: What holds if they fit, and have not been seen in microbatches of several sizes.
        """
        lengths = [len(value) for value in values]
        fit = _are_proportional(lengths, sizes)
        if len(set(sizes)) > 1 and (fit or len(set(lengths)) == 1):
            self._are_rows[name] = fit
        if fit and name not in self._are_rows and (not unknown or all(_is_equal(value, values[0]) for value in values)):
            self._learn()
        return fit and self._are_rows.get(name, unknown)

    def _learn(self) -> None:
        study, self.study = self.study, None
        if study is not None:
            study()


_FIX = (
    "Make what counts differ from what is constant: count with torchmetrics (SumMetric), or in on_train_batch_end,"
    " on_validation_batch_end or the like, or set pipeline.num_microbatches=1."
)


def unknown_number(values: Sequence[Number], sizes: Sequence[int], name: str) -> StepError:
    """The error for equal values that may count samples or be a constant."""
    return StepError(
        f"{name} is {_listed(values)} in the microbatches of a batch, of {_listed(sizes)} samples: a constant, or a"
        f" count of something of which the batch has the sum; which of them is unknown. {_FIX}"
    )


def _are_proportional(lengths: Sequence[int], sizes: Sequence[int]) -> bool:
    """Whether there are as many entries for each sample."""
    ratios = {divmod(length, size) for length, size in zip(lengths, sizes, strict=True)}
    return len(ratios) == 1 and all(rest == 0 < each for each, rest in ratios)


def _listed(values: Sequence[Number]) -> str:
    shown = [value.tolist() if isinstance(value, Tensor) else value for value in values[:4]]
    return f"{', '.join(f'{value!r:.40}' for value in shown)}{', ...' if len(values) > 4 else ''}"


def _shown(values: Sequence[Number], sizes: Sequence[int]) -> _Kind | None:
    differ_in_size = len(set(sizes)) > 1
    if all(_is_equal(value, values[0]) for value in values):
        return "constant" if differ_in_size else None
    pairs = zip(values, sizes, strict=True)
    is_proportional = all(_is_equal(value * sizes[0], values[0] * size) for value, size in pairs)
    return "samples" if is_proportional and differ_in_size else "count"


def _is_equal(first: Any, second: Any) -> bool:
    if isinstance(first, Tensor) and isinstance(second, Tensor):
        return torch.equal(first, second)
    return first is second or (isinstance(first, (int, float)) and first == second)


def is_zero(value: Number) -> bool:
    """Whether it is 0, or all of it."""
    return not bool(value.any()) if isinstance(value, Tensor) else value == 0
