"""Uses of a weight with more structure than ``input @ weight``: einsum, and batched products with stacked weights.

    experts      [expert, token, in] x [expert, in, out]  -> [expert, token, out]       torch.bmm, torch.matmul
                 [token, out, in] x [token, in, 1]        -> [token, out, 1]            the weight first
                 [token, in] x [expert, in, out]          -> [token, out]               grouped_mm
    heads        btd, dhk -> bthk                                                        torch.einsum

A letter that the weight and the output have, and the input has not, is a feature; one that weight and input have, and
the output has not, is contracted. So a weight is column or row as in a projection. Products of two activations stand
here, too.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_3d.sharding.axis import Axis
from lightning_3d.sharding.placement import REPLICATE_PARTIAL_GRAD, InterleavedShard, Placement, Shard
from lightning_3d.sharding.rules.call import PARTIAL, LocalCall, TorchCall
from lightning_3d.sharding.rules.function import EXPERTS_MATMULS
from lightning_3d.sharding.sharded_tensor import ShardedTensor, placement_of
from lightning_3d.torch_internals.autocast import as_autocast

_BATCHED_MATMULS = (torch.matmul, Tensor.matmul, Tensor.__matmul__, torch.bmm, Tensor.bmm)


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

    def run(self, input: Tensor, weight: Tensor) -> Tensor:
        """The contraction of other operands of the same structure, such as shards."""
        if self.multiply is not None:
            return self.multiply(input, weight)
        if self.contracted and set(self.of_weight) <= {*self.of_input, *self.of_output}:  # else no product
            weight = as_autocast(weight)
        return torch.einsum(f"{self.of_input},{self.of_weight}->{self.of_output}", input, weight)


def contract(call: TorchCall, axis: Axis) -> LocalCall | None:
    """A contraction with a sharded weight: column gives a sharded result, row a partial one."""
    contraction = as_contraction(call, is_weight)
    if contraction is None:
        return None
    at = contraction.weight.placement  # type: ignore[attr-defined]  # `is_weight`
    letter = contraction.of_weight[at.dim]
    is_column = letter in contraction.features
    if not is_column and (letter not in contraction.contracted or isinstance(at, InterleavedShard)):
        return None
    return LocalCall(
        tensors=(contraction.input, contraction.weight),
        input_placements=(REPLICATE_PARTIAL_GRAD if is_column else Shard(contraction.of_input.index(letter)), at),
        run=contraction.run,
        result=at.at(contraction.of_output.index(letter)) if is_column else PARTIAL,
        weight=contraction.weight,
    )


def is_weight(tensor: Tensor) -> bool:
    """Whether a tensor is a sharded weight, or was made of one."""
    return isinstance(tensor, ShardedTensor) and tensor.is_weight


def as_contraction(call: TorchCall, is_weight: Callable[[Tensor], bool]) -> Contraction | None:
    """Read a call as a contraction of an activation with a weight, or None."""
    if call.function is torch.einsum and not call.kwargs:
        return _einsum(call.args, is_weight)
    if call.name in EXPERTS_MATMULS:
        return _experts_matmul(call, is_weight)
    if not _is_batched_matmul(call):
        return None
    left, right = call.args
    if left.dim() != 3 or right.dim() != 3 or left.shape[0] != right.shape[0]:
        return None
    return _of_weight(call.args, ("bnk", "bkm"), "bnm", is_weight)


def multiply_stacks(call: TorchCall, axis: Axis) -> LocalCall | None:
    """Two activations sharded on the same batch dim, or one of them: a plain operand is cut alike, or broadcast."""
    if not _is_batched_matmul(call):
        return None
    left, right = call.args
    placements = {placement for operand in call.args if (placement := placement_of(operand)) is not None}
    at = placements.pop()
    if placements or left.dim() != right.dim() or at.dim >= left.dim() - 2:
        return None
    length = max(left.shape[at.dim], right.shape[at.dim])
    if any(operand.shape[at.dim] not in (1, length) for operand in call.args):
        return None
    input_placements: list[Placement] = [
        at if operand.shape[at.dim] == length else REPLICATE_PARTIAL_GRAD for operand in call.args
    ]
    return LocalCall(tensors=(left, right), input_placements=tuple(input_placements), run=call.run, result=at)


def _is_batched_matmul(call: TorchCall) -> bool:
    """Whether a call multiplies two stacks of matrices, ``[..., n, k] @ [..., k, m]``."""
    return call.function in _BATCHED_MATMULS and len(call.args) == 2 and not call.kwargs


def _experts_matmul(call: TorchCall, is_weight: Callable[[Tensor], bool]) -> Contraction | None:
    """``grouped_mm``, in torch and in transformers: one product per expert with the rows that are routed to it.

    Input ``[rows, in]``, sorted by expert; weight ``[experts, in, out]``; offsets ``[experts]``, where each one's rows
    end. None for any other shapes or options.
    """
    options = {name: value for name, value in call.kwargs.items() if value is not None}
    given = dict(zip(("input", "weight", "offs"), call.args, strict=False)) | options
    if len(call.args) not in (2, 3) or given.keys() != {"input", "weight", "offs"}:
        return None
    input, weight = given["input"], given["weight"]
    if (input.dim(), weight.dim()) != (2, 3) or not is_weight(weight):
        return None
    return Contraction(
        input=input,
        weight=weight,
        of_input="nk",
        of_weight="ekm",
        of_output="nm",
        multiply=lambda input, weight: call.function(input, weight, *call.args[2:], **call.kwargs),
    )


def _einsum(args: tuple[Any, ...], is_weight: Callable[[Tensor], bool]) -> Contraction | None:
    equation = args[0].replace(" ", "") if args and isinstance(args[0], str) else ""
    operands = args[1] if len(args) == 2 and isinstance(args[1], list | tuple) else args[1:]
    found = re.fullmatch(r"([A-Za-z]+),([A-Za-z]+)->([A-Za-z]+)", equation)
    if found is None or len(operands) != 2 or any(len(set(part)) < len(part) for part in found.groups()):
        return None
    *letters, output = found.groups()
    return _of_weight(operands, letters, output, is_weight)


def _of_weight(
    operands: Sequence[Tensor], letters: Sequence[str], output: str, is_weight: Callable[[Tensor], bool]
) -> Contraction | None:
    """The contraction of two operands, one of which is a weight; the second, if both are."""
    for i, weight in ((1, operands[1]), (0, operands[0])):
        if is_weight(weight):
            input, of_input = operands[1 - i], letters[1 - i]
            return Contraction(input=input, weight=weight, of_input=of_input, of_weight=letters[i], of_output=output)
    return None
