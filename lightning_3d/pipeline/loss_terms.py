"""The terms of a loss that is a sum, which are compared one by one.

    error + beta * coupled      with a beta of 0, or of next to nothing, the loss shows its first term alone

The factors of terms may change from step to step, as those of schedules do; how their samples are joined does not.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

_SUMS = frozenset({"add", "iadd", "isub", "neg", "radd", "rsub", "sub", "subtract"})
_TIMES = frozenset({"imul", "mul", "multiply", "rmul"})
_OVER = frozenset({"div", "divide", "idiv", "itruediv", "true_divide", "truediv"})


@dataclass(frozen=True, kw_only=True)
class LossTerm:
    """A term, whose sign is left out."""

    value: Tensor
    """0-d, with its graph."""
    factor: float = 1.0
    """The number that multiplies it in the loss."""

    def gradients(self, tensors: Sequence[Tensor]) -> list[Tensor | None]:
        """The gradients of what blocks gave, without the factor; the graph stays."""
        return list(torch.autograd.grad(self.value, tensors, allow_unused=True, retain_graph=True))


class LossTerms:
    """Follows the terms of numbers through the functions that the loss code calls.

    Args:
        value_of: Gives the data behind a tensor of the step.
    """

    def __init__(self, value_of: Callable[[Tensor], Tensor]) -> None:
        self._value_of = value_of
        self._of_sums: dict[int, tuple[object, list[LossTerm]]] = {}  # by id

    def of(self, number: Tensor) -> list[LossTerm]:
        """The terms of a 0-d tensor; itself if it is no sum."""
        if id(number) in self._of_sums:
            return self._of_sums[id(number)][1]
        return [LossTerm(value=self._value_of(number).clone())]  # what it is now: it may be changed in place

    def before(self, name: str, args: Sequence[Any], of_blocks: Sequence[Tensor]) -> list[LossTerm]:
        """The terms of what the function of this name is to make of its arguments; none if it is no sum of numbers."""
        trained = [leaf for leaf in of_blocks if leaf.requires_grad]
        if not trained or any(leaf.ndim for leaf in args if isinstance(leaf, Tensor)):
            return []
        if name in _SUMS:
            return [term for leaf in trained for term in self.of(leaf)]
        if len(of_blocks) > 1 or len(args) != 2 or name not in _TIMES | _OVER:
            return []
        other = next(leaf for leaf in args if leaf is not trained[0])
        if name in _TIMES:
            return [replace(term, factor=term.factor * _number(other)) for term in self.of(trained[0])]
        if args[0] is not trained[0] or not _number(other):
            return []
        return [replace(term, factor=term.factor / _number(other)) for term in self.of(trained[0])]

    def note(self, number: object, terms: list[LossTerm]) -> None:
        """A function has made it of these terms."""
        self._of_sums[id(number)] = number, terms


def _number(factor: Tensor | float) -> float:
    return float(factor.detach() if isinstance(factor, Tensor) else factor)
