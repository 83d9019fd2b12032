"""Uses of a weight with more structure than ``input @ weight``: einsum, and batched products with stacked weights.

    experts      [expert, token, in] x [expert, in, out]  -> [expert, token, out]       torch.bmm, torch.matmul
    heads        btd, dhk -> bthk                                                        torch.einsum

A letter that the weight and the output have, and the input has not, is a feature; one that weight and input have, and
the output has not, is contracted. So a weight is column or row as in a projection.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_3d.tensor.calls import Function, is_batched_matmul


@dataclass(frozen=True, kw_only=True, slots=True)
class Contraction:
    """``torch.einsum`` of an activation and a weight."""

    input: Tensor
    weight: Tensor
    of_input: str
    """A letter per dim."""
    of_weight: str
    of_output: str

    @property
    def features(self) -> list[str]:
        return [letter for letter in self.of_weight if letter in self.of_output and letter not in self.of_input]

    @property
    def contracted(self) -> list[str]:
        return [letter for letter in self.of_weight if letter in self.of_input and letter not in self.of_output]

    def separates(self, dim: int | None) -> bool:
        """Whether dim `dim` of the weight is of features or contracted, and not of a batch."""
        return dim is not None and self.of_weight[dim] in (*self.features, *self.contracted)

    def run(self, input: Tensor, weight: Tensor) -> Tensor:
        """The contraction of other operands of the same structure, such as shards."""
        return torch.einsum(f"{self.of_input},{self.of_weight}->{self.of_output}", input, weight)


def as_contraction(
    function: Function, args: Sequence[Any], kwargs: Mapping[str, Any], is_weight: Callable[[Tensor], bool]
) -> Contraction | None:
    """Read a call as a contraction of an activation with a weight, or None."""
    if function is torch.einsum and not kwargs:
        return _einsum(args, is_weight)
    if not is_batched_matmul(function, args, kwargs) or not is_weight(args[1]):
        return None
    if args[0].dim() != 3 or args[1].dim() != 3 or args[0].shape[0] != args[1].shape[0]:
        return None
    return Contraction(input=args[0], weight=args[1], of_input="bnk", of_weight="bkm", of_output="bnm")


def _einsum(args: Sequence[Any], is_weight: Callable[[Tensor], bool]) -> Contraction | None:
    equation = args[0].replace(" ", "") if args and isinstance(args[0], str) else ""
    operands = args[1] if len(args) == 2 and isinstance(args[1], list | tuple) else args[1:]
    found = re.fullmatch(r"([A-Za-z]+),([A-Za-z]+)->([A-Za-z]+)", equation)
    if found is None or len(operands) != 2 or any(len(set(part)) < len(part) for part in found.groups()):
        return None
    first, second, output = found.groups()
    if is_weight(operands[1]):
        return Contraction(input=operands[0], weight=operands[1], of_input=first, of_weight=second, of_output=output)
    if is_weight(operands[0]):
        return Contraction(input=operands[1], weight=operands[0], of_input=second, of_weight=first, of_output=output)
    return None
