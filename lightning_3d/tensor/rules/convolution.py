"""Convolutions as uses of a weight: output channels are the features, input channels what is contracted.

    groups    input channels    the weight
    1         replicated        column: output channels are sharded
    1         sharded           row: input channels are sharded; the partial result is reduced, then the bias added
    more      sharded           column: every rank has the groups of its own channels (depthwise, ResNeXt)

Anything else stays replicated.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch.nn.functional as F
from torch import Tensor

from lightning_3d.tensor.axis import Axis
from lightning_3d.tensor.placement import EACH, WHOLE, Parts, Placement, Sharded
from lightning_3d.tensor.rules.call import PARTIAL, Call, LocalCall
from lightning_3d.tensor.rules.function import Function
from lightning_3d.tensor.sharded_tensor import placement_of

Form = Literal["column", "row", "groups", "whole"]
"""groups: every rank convolves its own groups; whole: all ranks compute the same."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Convolution:
    """One convolution of an activation with a weight."""

    function: Function

    input: Tensor
    """``[batch, channels, *spatial]``, or without the batch."""

    weight: Tensor
    """``[out, in / groups, *kernel]``; of a transposed convolution ``[in, out / groups, *kernel]``."""

    bias: Tensor | None
    """``[out]``."""

    groups: int

    features_dim: int
    """The weight's dim of output channels (those of one group if there are several)."""

    options: Mapping[str, Any]
    """Stride, padding and so on, by name."""

    @property
    def input_dim(self) -> int:
        """The dim of the channels, in the input and in the output."""
        return self.input.dim() - self.weight.dim() + 1

    @property
    def is_depthwise(self) -> bool:
        """Whether every channel of the input becomes one of the output."""
        return self.weight.shape[0] == self.groups and self.weight.shape[1] == 1

    def form(self, weight_dim: int | None, *, has_parts: bool, size: int) -> Form:
        """How the ranks make the call.

        Args:
            weight_dim: The dim that the weight is sharded on; None if it is replicated.
            has_parts: Whether that dim consists of parts.
            size: Length of the axis.
        """
        if self.groups > 1:
            is_own = self.is_depthwise if has_parts else self.groups % size == 0
            return "groups" if weight_dim == 0 and is_own else "whole"
        if weight_dim == self.features_dim:
            return "column"
        return "row" if weight_dim == 1 - self.features_dim and not has_parts else "whole"

    def run(self, input: Tensor, weight: Tensor, bias: Tensor | None, groups: int) -> Tensor:
        """The convolution of other operands, such as shards."""
        output: Tensor = self.function(input, weight, bias, groups=groups, **self.options)
        return output

    def with_bias(self, output: Tensor, bias: Tensor | None) -> Tensor:
        """An output with the bias added to its channels; its dtype, which autocast may have chosen, stays."""
        return output if bias is None else output + bias.view(-1, *[1] * (self.weight.dim() - 2)).to(output.dtype)


_OPTIONS = ("stride", "padding", "dilation", "groups")

_TRANSPOSED_OPTIONS = ("stride", "padding", "output_padding", "groups", "dilation")

_CONVOLUTIONS: Mapping[Function, tuple[int, Sequence[str]]] = {
    F.conv1d: (0, _OPTIONS),
    F.conv2d: (0, _OPTIONS),
    F.conv3d: (0, _OPTIONS),
    F.conv_transpose1d: (1, _TRANSPOSED_OPTIONS),
    F.conv_transpose2d: (1, _TRANSPOSED_OPTIONS),
    F.conv_transpose3d: (1, _TRANSPOSED_OPTIONS),
}
"""Function -> the weight's dim of output channels, names of its options in order. ``torch.conv2d`` is ``F.conv2d``."""


NAMES = tuple(function.__name__ for function in _CONVOLUTIONS)


def as_convolution(function: Function, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Convolution | None:
    """Read a call as a convolution, or None."""
    if function not in _CONVOLUTIONS:
        return None
    features_dim, names = _CONVOLUTIONS[function]
    given = dict(zip(("input", "weight", "bias", *names), args, strict=False)) | dict(kwargs)
    if any(name not in given for name in ("input", "weight")):
        return None
    return Convolution(
        function=function,
        input=given["input"],
        weight=given["weight"],
        bias=given.get("bias"),
        groups=given.get("groups", 1),
        features_dim=features_dim,
        options={name: given[name] for name in names if name != "groups" and name in given},
    )


def convolve(call: Call, axis: Axis) -> LocalCall | None:
    """A convolution of a sharded input, or with a sharded weight."""
    convolution = as_convolution(call.function, call.args, call.kwargs)
    if convolution is None:
        return None
    at = placement_of(convolution.weight)
    sharded = at if isinstance(at, Sharded) else None
    dim = None if sharded is None else sharded.dim
    form = convolution.form(dim, has_parts=isinstance(at, Parts), size=axis.size)
    if form == "whole" or sharded is None:
        return _call(convolution, WHOLE, WHOLE, bias=WHOLE, result=WHOLE, groups=convolution.groups)
    along = sharded.at(convolution.input_dim)
    if form == "column":
        return _call(convolution, EACH, sharded, bias=sharded.at(0), result=along, groups=1)
    if form == "groups":
        groups = convolution.groups // axis.size
        return _call(convolution, along, sharded, bias=sharded.at(0), result=along, groups=groups)
    return LocalCall(
        tensors=(convolution.input, convolution.weight),
        needs=(along, sharded),
        run=lambda input, weight: convolution.run(input, weight, None, 1),
        result=PARTIAL,
        weight=convolution.weight,
        then=lambda output: convolution.with_bias(output, convolution.bias),
    )


def _call(
    call: Convolution, input: Placement, weight: Placement, *, bias: Placement, result: Placement, groups: int
) -> LocalCall:
    return LocalCall(
        tensors=(call.input, call.weight) if call.bias is None else (call.input, call.weight, call.bias),
        needs=(input, weight) if call.bias is None else (input, weight, bias),
        run=lambda input, weight, bias=None: call.run(input, weight, bias, groups),
        result=result,
        weight=None if weight == WHOLE else call.weight,
    )
