"""How a tensor comes from a head's logits, and the functions of it that need no logits: they are of other rows.

A view has the number of the head's row of each of its own rows. A function of views is seen by what it does to a tensor
without memory that has the view's shape, one element a row, and stride 0 along the classes, which it has to keep:

    logits [2, 3, classes], rows 0..5      strides [3, 1, 0]
    logits[:, 1:]                          strides [3, 1, 0] from 1     rows [[1, 2], [4, 5]]
    logits.transpose(1, 2)                 strides [3, 0, 1]            the classes are dim 1
    logits.flatten(1)                      a copy, as classes of several rows stand in one dim: needs the logits
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from lightning_3d.sharding.rules.function import Function, function_name
from lightning_3d.tensor.vocabulary.chunked_loss import Elementwise
from lightning_3d.tensor.vocabulary.head_call import HeadCall
from lightning_3d.torch_internals.tensors import contiguous_stride, storage_id
from lightning_3d.trace.output_uses import CASTS, COPIES, ELEMENTWISE, LOG, VIEWS


@dataclass(frozen=True, slots=True)
class Cast:
    """Logits in another dtype."""

    dtype: torch.dtype

    def __call__(self, logits: Tensor) -> Tensor:
        return logits.to(self.dtype)


@dataclass(frozen=True, kw_only=True, slots=True)
class View:
    """How a tensor comes from a head's logits."""

    call: HeadCall
    rows: Tensor
    """The numbers of its rows among those of the head, int64, contiguous; its shape without the classes."""
    class_dim: int
    dtype: torch.dtype
    epilogue: tuple[Elementwise, ...] = ()
    is_log: bool = False
    """Whether they are logarithms of probabilities, of the logits after `epilogue`."""
    has_all_rows: bool = True
    """Whether they are all rows of the head, in their order."""

    @staticmethod
    def of(call: HeadCall) -> View:
        """The logits as the head makes them."""
        shape = call.rows.shape[:-1]
        rows = torch.arange(shape.numel(), device=call.rows.device).view(shape)
        return View(call=call, rows=rows, class_dim=len(shape), dtype=call.dtype)

    @property
    def shape(self) -> torch.Size:
        """The shape of the tensor."""
        shape = list(self.rows.shape)
        shape.insert(self.class_dim, self.call.num_classes)
        return torch.Size(shape)

    def inputs(self) -> Tensor:
        """The head's inputs for its rows, ``[rows, width]``."""
        inputs: Tensor = self.call.rows.reshape(-1, self.call.rows.shape[-1])
        return inputs if self.has_all_rows else inputs[self.rows.flatten()]

    def after(self, func: Function, args: Sequence[Any], kwargs: Mapping[str, Any]) -> View | None:
        """The view that a function makes of the tensor; None if it needs the logits."""
        name = function_name(func)
        if name == "__getitem__" and (view := self._picked(*args)) is not None:
            return view
        if name in VIEWS:
            return self._viewed(func, args, kwargs)
        if name in COPIES:
            return None if args or kwargs else self
        if name == LOG:
            return self._logarithms(func, args, kwargs)
        if kwargs or name not in ELEMENTWISE or not all(type(arg) in (int, float, torch.dtype) for arg in args):
            return None
        return self._elementwise(func, args)

    def _viewed(self, func: Function, args: Sequence[object], kwargs: Mapping[str, object]) -> View | None:
        strides = list(contiguous_stride(self.rows.shape))
        strides.insert(self.class_dim, 0)
        probe = torch.empty_strided(self.shape, strides, dtype=self.dtype, device="meta")
        try:
            seen: Tensor = func(probe, *args, **kwargs)
        except Exception:  # the logits themselves will say what is wrong
            return None
        storages = {storage_id(tensor.untyped_storage()) for tensor in (probe, seen)}
        if len(storages) > 1 or seen.dtype != probe.dtype:
            return None
        shape, strides = list(seen.shape), list(seen.stride())
        places = [dim for dim, stride in enumerate(strides) if stride == 0 and shape[dim] == self.call.num_classes]
        if len(places) != 1:
            return None
        (class_dim,) = places
        del shape[class_dim], strides[class_dim]
        rows = self.rows.as_strided(shape, strides, self.rows.storage_offset() + seen.storage_offset())
        has_all_rows = self.has_all_rows and rows.numel() == self.rows.numel() and rows.is_contiguous()
        return replace(self, rows=rows.contiguous(), class_dim=class_dim, has_all_rows=has_all_rows)

    def _picked(self, index: Any) -> View | None:
        """Rows that tensors pick, as ``logits[mask]``."""
        parts = index if isinstance(index, tuple) else (index,)
        tensors = [part for part in parts if isinstance(part, Tensor)]
        are_plain = all(type(part) is Tensor and part.dtype in (torch.bool, torch.int64) for part in tensors)
        if not tensors or not are_plain or not all(type(part) in (int, slice, Tensor) for part in parts):
            return None
        num_dims = sum(part.dim() if part.dtype == torch.bool else 1 for part in tensors) + len(parts) - len(tensors)
        if self.class_dim != self.rows.dim() or num_dims > self.rows.dim():
            return None
        rows = self.rows[index].contiguous()
        return replace(self, rows=rows, class_dim=rows.dim(), has_all_rows=False)

    def _elementwise(self, func: Function, args: Sequence[object]) -> View | None:
        dtype = func(self._single(), *args).dtype
        if not dtype.is_floating_point:
            return None
        if function_name(func) not in CASTS:
            return None if self.is_log else replace(self, epilogue=(*self.epilogue, lambda chunk: func(chunk, *args)))
        if self.is_log:  # the loss is that of their own dtype, or wider
            return replace(self, dtype=dtype) if torch.promote_types(self.dtype, dtype) == dtype else None
        return self._cast(dtype)

    def _cast(self, dtype: torch.dtype) -> View:
        return self if dtype == self.dtype else replace(self, epilogue=(*self.epilogue, Cast(dtype)), dtype=dtype)

    def _logarithms(self, func: Function, args: Sequence[object], kwargs: Mapping[str, object]) -> View | None:
        dim = kwargs.get("dim", args[0] if args else None)
        if self.is_log or type(dim) is not int or dim % len(self.shape) != self.class_dim or "out" in kwargs:
            return None
        dtype = func(self._single(), *args, **kwargs).dtype  # autocast has a say
        if torch.finfo(dtype).bits < 32:  # rounded, which the loss sees
            return None
        return replace(self._cast(dtype), is_log=True)

    def _single(self) -> Tensor:
        return torch.empty([1] * len(self.shape), dtype=self.dtype, device=self.rows.device)
