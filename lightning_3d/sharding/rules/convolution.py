"""Convolutions as uses of a weight: output channels are the features, input channels what is contracted.

    groups    input channels    the weight
    1         replicated        column: output channels are sharded
    1         sharded           row: input channels are sharded; the partial result is reduced, then the bias added
    more      sharded           column: every rank has the groups of its own channels (depthwise, ResNeXt)

Anything else stays replicated.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from lightning_3d.sharding.axis import Axis
from lightning_3d.sharding.placement import REPLICATE_PARTIAL_GRAD, InterleavedShard
from lightning_3d.sharding.rules.call import LocalCall, TorchCall, on_whole
from lightning_3d.sharding.rules.function import Function
from lightning_3d.sharding.rules.projection import Projection
from lightning_3d.sharding.sharded_tensor import placement_of
from lightning_3d.torch_internals.autocast import as_autocast


@dataclass(frozen=True, kw_only=True, slots=True)
class Convolution(Projection):
    """One convolution of an activation with a weight.

    Input ``[batch, channels, *spatial]``, or without the batch. Weight ``[out, in / groups, *kernel]``; of a transposed
    convolution ``[in, out / groups, *kernel]``. Bias ``[out]``.
    """

    function: Function

    groups: int

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

    def run(self, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """The convolution of other operands, such as shards."""
        output: Tensor = self.function(input, as_autocast(weight), bias, groups=self.groups, **self.options)
        return output

    def with_bias(self, output: Tensor) -> Tensor:
        """An output with the bias added to its channels; its dtype, which autocast may have chosen, stays."""
        assert self.bias is not None
        return output + self.bias.view(-1, *[1] * (self.weight.dim() - 2)).to(output.dtype)


_OPTIONS = ("stride", "padding", "dilation", "groups")

_TRANSPOSED_OPTIONS = ("stride", "padding", "output_padding", "groups", "dilation")

_CONVOLUTIONS: Mapping[Function, tuple[int, Sequence[str]]] = {
    **dict.fromkeys((F.conv1d, F.conv2d, F.conv3d), (0, _OPTIONS)),
    **dict.fromkeys((F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d), (1, _TRANSPOSED_OPTIONS)),
}
"""Function -> the weight's dim of output channels, names of its options in order. ``torch.conv2d`` is ``F.conv2d``."""

NAMES = tuple(function.__name__ for function in _CONVOLUTIONS)


def as_convolution(call: TorchCall) -> Convolution | None:
    """Read a call as a convolution, or None."""
    if call.function not in _CONVOLUTIONS:
        return None
    features_dim, names = _CONVOLUTIONS[call.function]
    given = dict(zip(("input", "weight", "bias", *names), call.args, strict=False)) | call.kwargs
    if any(name not in given for name in ("input", "weight")):
        return None
    return Convolution(
        function=call.function,
        input=given["input"],
        weight=given["weight"],
        bias=given.get("bias"),
        groups=given.get("groups", 1),
        features_dim=features_dim,
        options={name: given[name] for name in names if name != "groups" and name in given},
    )


def convolve(call: TorchCall, axis: Axis) -> LocalCall | None:
    """A convolution of a sharded input, or with a sharded weight."""
    convolution = as_convolution(call)
    if convolution is None:
        return None
    at = placement_of(convolution.weight)
    if at is None:
        return on_whole(call)
    along = at.at(convolution.input_dim)
    if convolution.groups > 1:
        is_own = convolution.is_depthwise if isinstance(at, InterleavedShard) else convolution.groups % axis.size == 0
        if at.dim != 0 or not is_own:
            return on_whole(call)
        own = replace(convolution, groups=convolution.groups // axis.size)
        return own.column(at, input=along, bias=at.at(0), result=along)
    if at.dim == convolution.features_dim:
        return convolution.column(at, input=REPLICATE_PARTIAL_GRAD, bias=at.at(0), result=along)
    return (
        convolution.row(at)
        if at.dim == 1 - convolution.features_dim and not isinstance(at, InterleavedShard)
        else on_whole(call)
    )
