"""What numbers of microbatches mean for their batch, by evidence.

An integer that is 4 in every microbatch of 4 samples may count samples (16 in a batch of 16) or be a constant (4). What
it is shows where microbatches differ in size:

    sizes 4, 3, 5    values 4, 3, 5    samples: the batch has their sum
                     values 2, 2, 2    constant: the batch has 2
                     values 1, 3, 2    count of something in the data: the batch has their sum

So before the first step of a kind, the step runs on microbatches of two sizes with random outputs of blocks
(``study.py``), and what shows there holds for later steps. Likewise for tensors: rows
are as many as samples, or the same multiple of it, whatever the size.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from lightning_3d.errors import StepError

Number = int | float | Tensor
_Kind = Literal["constant", "samples", "count"]


class Evidence:
    """What is known of the values that steps give, by name."""

    def __init__(self) -> None:
        self._kinds: dict[str, _Kind] = {}
        self._are_rows: dict[str, bool] = {}
        self._kept: set[str] = set()  # names whose equal values were taken for constant

    def kind(self, values: Sequence[Number], sizes: Sequence[int], name: str) -> _Kind | None:
        """What values mean: the batch has the same, if constant, else their sum. None if unknown.

        Args:
            values: One per microbatch, tensors of equal shape or numbers.
            sizes: Samples in each microbatch.
            name: What and where it is, equal in every step.

        Raises:
            StepError: it differs, and was taken for a constant in an earlier step.
        """
        shown, known = _shown(values, sizes), self._kinds.get(name)
        kind = shown if known is None or shown is None or shown == known else "count"
        if shown is not None:
            self._kinds[name] = kind or shown
        if kind == "count" and name in self._kept:
            raise StepError(
                f"{name} was the same in all microbatches of earlier batches, and taken for a constant, but now it is"
                f" {_listed(values)}. {_FIX}"
            )
        found = kind or known
        if found == "constant" and len(set(sizes)) == 1 and not is_zero(values[0]):
            self._kept.add(name)
        return found

    def are_rows(self, lengths: Sequence[int], sizes: Sequence[int], name: str, *, unknown: bool) -> bool:
        """Whether tensors or lists whose lengths fit the numbers of samples have entries for each sample.

        Args:
            lengths: One per microbatch.
            unknown: What holds if they have not been seen in microbatches of several sizes.
        """
        ratios = {divmod(length, size) for length, size in zip(lengths, sizes, strict=True)}
        fit = len(ratios) == 1 and all(rest == 0 < each for each, rest in ratios)
        if len(set(sizes)) > 1 and (fit or len(set(lengths)) == 1):
            self._are_rows[name] = fit
        return fit and self._are_rows.get(name, unknown)


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


def _is_equal(first: Number, second: Number) -> bool:
    return torch.equal(first, second) if isinstance(first, Tensor) and isinstance(second, Tensor) else first == second  # type: ignore[return-value]


def is_zero(value: Number) -> bool:
    """Whether it is 0, or all of it."""
    return not bool(value.any()) if isinstance(value, Tensor) else value == 0
