"""Uses of a weight with more structure than ``input @ weight``: einsum, and batched products with stacked weights.

    experts      [expert, token, in] x [expert, in, out]  -> [expert, token, out]       torch.bmm, torch.matmul
                 [token, out, in] x [token, in, 1]        -> [token, out, 1]            the weight first
                 [token, in] x [expert, in, out]          -> [token, out]               grouped_mm
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

from lightning_3d.tensor.axis import Axis
from lightning_3d.tensor.placement import EACH, Parts, Shard
from lightning_3d.tensor.rules.call import PARTIAL, Call, LocalCall
from lightning_3d.tensor.rules.experts_matmul import experts_matmul, is_experts_matmul
from lightning_3d.tensor.rules.function import Function, is_batched_matmul
from lightning_3d.tensor.sharded_tensor import ShardedTensor


@dataclass(frozen=True, kw_only=True, slots=True)
class Contraction:
    """``torch.einsum`` of an activation and a weight, or a call that does as much by another name."""

    input: Tensor
    weight: Tensor
    of_input: str
    """A letter per dim."""
    of_weight: str
    of_output: str

    multiply: Callable[[Tensor, Tensor], Tensor] | None = None
    """The call with another input and weight; None for einsum."""

    @property
    def features(self) -> list[str]:
        return [letter for letter in self.of_weight if letter in self.of_output and letter not in self.of_input]

    @property
    def contracted(self) -> list[str]:
        return [letter for letter in self.of_weight if letter in self.of_input and letter not in self.of_output]

    @property
    def is_stacked(self) -> bool:
        """Whether the weight is a stack of matrices that each see a part of the input, as those of experts do."""
        return len(self.of_weight) > len(self.features) + len(self.contracted)

    def separates(self, dim: int | None, *, has_parts: bool) -> bool:
        """Whether ranks can contract shards of the weight on dim `dim`: of features, or contracted and not in parts."""
        if dim is None:
            return False
        return self.of_weight[dim] in (self.features if has_parts else (*self.features, *self.contracted))

    def run(self, input: Tensor, weight: Tensor) -> Tensor:
        """The contraction of other operands of the same structure, such as shards."""
        if self.multiply is not None:
            return self.multiply(input, weight)
        return torch.einsum(f"{self.of_input},{self.of_weight}->{self.of_output}", input, weight)


def contract(call: Call, axis: Axis) -> LocalCall | None:
    """A contraction with a sharded weight: column gives a sharded result, row a partial one."""
    contraction = as_contraction(call.function, call.args, call.kwargs, is_weight)
    if contraction is None:
        return None
    at = contraction.weight.placement  # type: ignore[attr-defined]  # `is_weight`
    if not contraction.separates(at.dim, has_parts=isinstance(at, Parts)):
        return None
    letter = contraction.of_weight[at.dim]
    is_column = letter in contraction.features
    return LocalCall(
        tensors=(contraction.input, contraction.weight),
        needs=(EACH if is_column else Shard(contraction.of_input.index(letter)), at),
        run=contraction.run,
        result=at.at(contraction.of_output.index(letter)) if is_column else PARTIAL,
        weight=contraction.weight,
        is_stacked=contraction.is_stacked,
    )


def is_weight(tensor: Tensor) -> bool:
    """Whether a tensor is a sharded weight, or was made of one."""
    return isinstance(tensor, ShardedTensor) and tensor.is_weight


def as_contraction(
    function: Function, args: Sequence[Any], kwargs: Mapping[str, Any], is_weight: Callable[[Tensor], bool]
) -> Contraction | None:
    """Read a call as a contraction of an activation with a weight, or None."""
    if function is torch.einsum and not kwargs:
        return _einsum(args, is_weight)
    if is_experts_matmul(function):
        return _experts_matmul(function, args, kwargs, is_weight)
    if not is_batched_matmul(function, args, kwargs):
        return None
    left, right = args
    if left.dim() != 3 or right.dim() != 3 or left.shape[0] != right.shape[0]:
        return None
    if is_weight(right):
        return Contraction(input=left, weight=right, of_input="bnk", of_weight="bkm", of_output="bnm")
    if is_weight(left):
        return Contraction(input=right, weight=left, of_input="bkn", of_weight="bmk", of_output="bmn")
    return None


def _experts_matmul(
    function: Function, args: Sequence[Any], kwargs: Mapping[str, Any], is_weight: Callable[[Tensor], bool]
) -> Contraction | None:
    operands = experts_matmul(args, kwargs)
    if operands is None or not is_weight(operands[1]):
        return None
    input, weight = operands
    return Contraction(
        input=input,
        weight=weight,
        of_input="nk",
        of_weight="ekm",
        of_output="nm",
        multiply=lambda input, weight: function(input, weight, *args[2:], **kwargs),
    )


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
