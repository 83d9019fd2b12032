"""Joining the numbers that a training step gives for its microbatches to those of the batch.

Floating-point numbers are averages over samples, or joined as the study of the loss found (``loss_study.py``). Whatever
else a step gives comes from one run of the code after the blocks on the whole batch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from functools import reduce
from typing import Any, Literal, TypeGuard, get_args

import torch
from torch import Tensor

from lightning_3d.errors import StepError
from lightning_3d.torch_internals.pytree import tree_leaves

Reduction = Literal["loss", "samples", "sum"]
"""Weights of a sum over microbatches: those of their losses, their shares of the samples, or 1."""
REDUCTIONS: tuple[Reduction, ...] = get_args(Reduction)
"""The ways to join, the preferred first."""


def are_numbers(tree: object) -> bool:
    """Whether this is a floating-point number, or a dict of them: what is joined here."""
    return all(
        leaf is None or isinstance(leaf, float) or (_is_one(leaf) and leaf.is_floating_point())
        for leaf in (tree_leaves(tree) if isinstance(tree, Mapping) else [tree])
    )


def _is_one(leaf: object) -> TypeGuard[Tensor]:
    return isinstance(leaf, Tensor) and leaf.numel() == 1


class Merger:
    """Joins numbers that have the same meaning in each microbatch.

    In all methods ``values`` has one entry per microbatch, and ``name`` says what it is and where.
    """

    def __init__(self) -> None:
        self.averages: Mapping[str, Set[Reduction]] = {}
        """The ways in which numbers may be joined, by name, as far as that was found."""
        self.loss_weights: Sequence[float] = ()
        """The factors of the present microbatches' losses in that of the batch."""

    def join(self, values: Sequence[Any], sizes: Sequence[int], name: str) -> object:
        """Join what steps returned: a number, or a dict of them; ``sizes`` are the samples of the microbatches.

        Raises:
            StepError: they returned something else.
        """
        first = values[0]
        if len(values) == 1 or all(value is None for value in values):
            return first
        if all(isinstance(value, Mapping) and value.keys() == first.keys() for value in values):
            merged = {key: self.join([value[key] for value in values], sizes, f"{name}[{key!r}]") for key in first}
            return merged if type(first) is dict else type(first)(merged)
        if not all(isinstance(value, float) or _is_one(value) for value in values):
            raise unseen(name)
        number = self.number(values, sizes, name)
        return number if isinstance(first, Tensor) else number.item()

    def number(
        self, values: Sequence[Tensor | float], sizes: Sequence[int], name: str, how: Reduction = "samples"
    ) -> Tensor:
        """Join floating-point values, tensors of equal shape or numbers; ``how`` unless something else was found."""
        found = self.averages.get(name, {how})
        return averaged(values, sizes, self.loss_weights, next(way for way in REDUCTIONS if way in found))


def unseen(what: str) -> StepError:
    """The error for what the microbatches of a step gave, but not its trace."""
    return StepError(
        f"With a pipeline a step runs once for each microbatch of a batch, and {what} was not there when the step was"
        " traced, so that it can't be told what the whole batch would give. Let it not depend on the data of the batch,"
        " or set pipeline.mode=inline."
    )


def averaged(
    values: Sequence[Tensor | float], sizes: Sequence[int], loss_weights: Sequence[float], how: Reduction
) -> Tensor:
    """Join tensors of equal shape or numbers, in their dtype if that is floating point.

    Those of microbatches that weigh nothing may be anything.
    """
    tensors = [torch.as_tensor(value) for value in values]
    dtype = reduce(torch.promote_types, (tensor.dtype for tensor in tensors))
    dtype = dtype if dtype.is_floating_point or dtype.is_complex else torch.get_default_dtype()
    weights: Sequence[float] = [1.0] * len(tensors)
    if how == "samples":
        weights = [size / sum(sizes) for size in sizes]
    elif how == "loss":
        weights = loss_weights
    merged = torch.zeros_like(tensors[0], dtype=torch.promote_types(dtype, torch.float64))
    for tensor, weight in zip(tensors, weights, strict=True):
        if weight != 0:
            merged.add_(tensor, alpha=weight)
    return merged.to(dtype)
