"""One product per expert with the rows that are routed to it: ``grouped_mm``, in torch and in transformers.

Input ``[rows, in]``, sorted by expert; weight ``[experts, in, out]``; offsets ``[experts]``, where each one's rows end.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from lightning_3d.tensor.rules.function import EXPERTS_MATMULS, Function, function_name


def is_experts_matmul(function: Function) -> bool:
    """Whether a call is such a product, of whatever shapes."""
    return function_name(function) in EXPERTS_MATMULS


def experts_matmul(args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Tensor, Tensor] | None:
    """Input and weights of a call as above, or None for any other shapes or options."""
    options = {name: value for name, value in kwargs.items() if value is not None}
    given = dict(zip(("input", "weight", "offs"), args, strict=False)) | options
    if len(args) not in (2, 3) or given.keys() != {"input", "weight", "offs"}:
        return None
    input, weight = given["input"], given["weight"]
    return (input, weight) if (input.dim(), weight.dim()) == (2, 3) else None


def grouped_mm(input: Tensor, weight: Tensor, *args: object, **kwargs: object) -> Tensor:
    """The product with the first expert: what ``F.grouped_mm`` gives, but for the numbers."""
    if (input.dim(), weight.dim()) != (2, 3):
        raise NotImplementedError(f"grouped_mm of {list(input.shape)} and {list(weight.shape)} on fake tensors")
    return input @ weight[0]


def without_data(function: Function) -> Function:
    """A function whose result has the same shape and history without data; any other function as it is.

    torch 2.13 has no rule for fake tensors in fp32.
    """
    return grouped_mm if is_experts_matmul(function) else function
