"""Versions, views and storages of tensors, which torch does not tell publicly, dtypes, and how a subclass is made."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, UntypedStorage

from lightning_3d.torch_internals.dispatch import DisableTorchFunction

IS_PARAMETER = "_is_param"
"""The attribute by which ``isinstance(tensor, nn.Parameter)`` knows tensors of other classes."""

make_wrapper = Tensor._make_wrapper_subclass
"""A tensor of a subclass, with shape, dtype and device, and no data."""

HALVES = (torch.float16, torch.bfloat16)
"""The 16-bit dtypes that programs train with."""

no_torch_function = torch._C._disabled_torch_function_impl
"""The ``__torch_function__`` of a subclass whose functions torch runs as those of plain tensors."""

VERSION = "_version"
"""The attribute of `version_of`, by which a function mode sees it read."""

version_of: Callable[[Tensor], int] = attrgetter(VERSION)
"""Grows by every in-place change of a tensor or of its views."""

BASE = "_base"
"""The attribute of `base_of`."""

base_of: Callable[[Tensor], Tensor | None] = attrgetter(BASE)
"""The tensor that a view was made of, for autograd; None for what is no view."""


def make_wrapper_like(cls: type[Tensor], like: Tensor, *, dtype: torch.dtype, requires_grad: bool = False) -> Any:
    """A tensor of a subclass that lies in memory as another one does, and has none."""
    return make_wrapper(
        cls,
        like.size(),
        strides=like.stride(),
        storage_offset=like.storage_offset(),
        dtype=dtype,
        device=like.device,
        requires_grad=requires_grad,
    )


def widened(tensor: Tensor) -> Tensor:
    """Numbers of 16 bits in fp32; others as they are."""
    return tensor.float() if tensor.dtype in HALVES else tensor


def apart(tensor: Tensor) -> Tensor:
    """The tensor, or a copy of a complex view of real numbers, of which torch makes no fake tensor."""
    base = base_of(tensor)
    if base is None or base.is_complex() or not tensor.is_complex():
        return tensor
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)


storage_id: Callable[[UntypedStorage], int] = attrgetter("_cdata")
"""Equal for storages that are the same memory, also where there is none, as with fake tensors."""


def storage_of(tensor: Tensor) -> int | None:
    """The `storage_id` of a tensor's memory; None for one that has none of its own, as sparse ones."""
    if tensor.layout is not torch.strided or tensor.is_nested or untransformed(tensor) is not tensor:
        return None
    with DisableTorchFunction():  # of a tensor of a subclass, it stands for no other's
        return storage_id(tensor.untyped_storage())


def count_as_parameter(tensor: Tensor) -> None:
    """Let ``isinstance(tensor, nn.Parameter)`` hold."""
    tensor._is_param = True


def contiguous_stride(shape: torch.Size) -> tuple[int, ...]:
    """The strides of a new tensor."""
    return torch.empty(shape, device="meta").stride()


def untransformed(tensor: Tensor) -> Tensor:
    """The tensor behind one inside of transforms of ``torch.func``; for ``vmap`` that of all samples."""
    while torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        tensor = torch._C._functorch.get_unwrapped(tensor)
    return tensor


are_transforms_active: Callable[[], bool] = torch._C._are_functorch_transforms_active
"""Whether code runs inside of a transform of ``torch.func``, where a plain autograd function can't be applied."""


without_transforms: Callable[[], AbstractContextManager[None]] = torch._C._DisableFuncTorch
"""A context in which tensors are made as outside of transforms of ``torch.func``."""


def has_gradient_hooks(parameter: Tensor) -> bool:
    """Whether a hook waits for the gradient of a parameter."""
    return bool(parameter._backward_hooks or parameter._post_accumulate_grad_hooks)


def set_gradient_hooks(leaf: Tensor, hooks: Mapping[int, Callable[[Tensor], None]]) -> None:
    """Have hooks called with the gradient of a leaf; ``register_hook`` makes a dict and a handle for each."""
    leaf._backward_hooks = hooks  # type: ignore[assignment]


def is_referred_to(tensor: Tensor) -> bool:
    """Whether more than one owner refers to a tensor, as where autograd hands one gradient to two nodes."""
    return bool(tensor._use_count() > 1)  # type: ignore[attr-defined]
