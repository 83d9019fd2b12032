"""Ghosts: tensors of another pipeline stage, with shape, dtype and device, and no data."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from lightning_3d.errors import TraceError
from lightning_3d.torch_internals.tensors import make_wrapper, no_torch_function


@dataclass(frozen=True, kw_only=True)
class TensorMeta:
    """A tensor without its data. A stage boundary sends it contiguously."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    requires_grad: bool
    values: Tensor | None = field(default=None, repr=False, compare=False)
    """The tensor itself, of integers that a block gets of the batch alone, by example."""
    strides: tuple[int, ...] | None = field(default=None, compare=False, repr=False)
    """None of one whose elements lie in their order."""

    @staticmethod
    def of(tensor: Tensor, values: Tensor | None = None) -> TensorMeta:
        """Describe a real, fake or meta tensor."""
        return TensorMeta(
            shape=tuple(tensor.shape),
            dtype=tensor.dtype,
            device=tensor.device,
            requires_grad=tensor.requires_grad,
            values=values,
            strides=tensor.stride() if tensor.layout is torch.strided and not tensor.is_contiguous() else None,
        )

    def laid_out(self, tensor: Tensor) -> Tensor:
        """A contiguous tensor with its dimensions in memory as this one has them, if no elements are between its own.

        So operators answer with the strides that they have in the trace.
        """
        strides = self.strides
        if strides is None:
            return tensor
        order = sorted(range(tensor.dim()), key=lambda dim: (-strides[dim], dim))
        found = tensor.permute(order).contiguous().permute([order.index(dim) for dim in range(tensor.dim())])
        return found if found.stride() == strides else tensor

    @property
    def num_bytes(self) -> int:
        """Size of the data."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize

    def on_meta(self) -> Tensor:
        """A contiguous leaf on the meta device."""
        return torch.empty(self.shape, dtype=self.dtype, device="meta", requires_grad=self.requires_grad)

    def as_seen(self) -> Tensor:
        """The values, if they are known; else `on_meta`."""
        return self.on_meta() if self.values is None else self.values

    def random(self, generator: torch.Generator | None = None) -> Tensor:
        """Numbers between 0 and 1, which probabilities, variances and the like are too; zeros for integers.

        They lie in memory as the tensor does.
        """
        if not (self.dtype.is_floating_point or self.dtype.is_complex):
            return self.laid_out(torch.zeros(self.shape, dtype=self.dtype, device=self.device))
        drawn = torch.float32 if self.dtype.itemsize == 1 else self.dtype  # torch draws no float8
        numbers = torch.rand(self.shape, dtype=drawn, device=self.device, generator=generator)
        return self.laid_out(numbers.to(self.dtype))


class Ghost(Tensor):
    """A tensor whose data lives on another pipeline stage.

    Calls with a ghost never reach the dispatcher: the interception of the running step answers them. What does
    reach it is a use that the step can't follow, and raises.
    """

    @staticmethod
    def __new__(cls, meta: TensorMeta) -> Ghost:
        return make_wrapper(
            cls,
            meta.shape,
            strides=meta.strides,
            dtype=meta.dtype,
            device=meta.device,
            requires_grad=meta.requires_grad,
        )

    def __init__(self, meta: TensorMeta) -> None:
        """``__new__`` took the argument."""

    __torch_function__ = no_torch_function  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch declares an instance method
        cls, func: Callable[..., object], types: Sequence[type], args: tuple[object, ...] = (), kwargs: object = None
    ) -> object:
        if func is torch.ops.aten.detach.default:  # nn.Parameter and .data make one
            return args[0]
        raise TraceError(
            f"{func} was called on a tensor that lives on another pipeline stage, from code that the pipeline does not"
            " see (a compiled function, a custom autograd.Function or a C++ extension outside of any block). Move the"
            " call into an nn.Module that is a block, or name its module with pipeline.partition='type:REGEX'."
        )

    def __repr__(self) -> str:  # type: ignore[override]  # torch's has a private argument
        return f"Ghost(shape={tuple(self.shape)}, dtype={self.dtype}, device='{self.device}')"
