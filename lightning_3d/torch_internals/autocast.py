"""The copies of weights in 16 bits that ``torch.autocast`` makes and may keep for further calls.

It keeps those of leaves alone. What a block's code finds of a sharded parameter is no leaf, as its gradient becomes a
part of the parameter's: calls that multiply with it ask for the kept copy here.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn

from lightning_3d.torch_internals.tensors import base_of, version_of

_Copies = dict[tuple[int, torch.dtype], tuple[Tensor, int, Tensor]]
"""Id of a shard and dtype -> the shard, so that no id is used twice, its version, and the copy."""

_kept: list[_Copies | None] = []  # by the contexts that are open; of the process, as torch's own cache is


@contextmanager
def autocast_cache(*, enabled: bool) -> Iterator[None]:
    """Inside, autocast keeps the copies that it makes while autograd records, or makes a copy for each call.

    Kept copies are gone at the end: they would outlive a step of their weights.
    """
    before = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(enabled)
    _kept.append({} if enabled else None)
    try:
        yield
    finally:
        _kept.pop()
        torch.set_autocast_cache_enabled(before)
        if enabled and not before:
            torch.clear_autocast_cache()


def as_autocast(weight: Tensor) -> Tensor:
    """A factor of a product, which autocast would cast; of a parameter's shard the copy that is kept, if any are."""
    copies, kind = _kept[-1] if _kept else None, weight.device.type
    if copies is None or weight.dtype != torch.float32 or not torch.is_autocast_enabled(kind):
        return weight
    shard, dtype = base_of(weight), torch.get_autocast_dtype(kind)
    if shard is None or not isinstance(weight, nn.Parameter):
        return weight
    known = copies.get((id(shard), dtype))
    if known is None or known[1] != version_of(shard):
        known = copies[id(shard), dtype] = (shard, version_of(shard), weight.detach().to(dtype))
    return cast(Tensor, _KeptCopy.apply(weight, known[2]))  # type: ignore[no-untyped-call]  # torch 2.13


class _KeptCopy(torch.autograd.Function):
    """A weight, its copy -> the copy, with the weight's history: as a cast of its own for each call that reads it."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, copy: Tensor) -> Tensor:
        ctx.dtype = weight.dtype
        return copy.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient.to(ctx.dtype), None
