"""Rules of calls on slices of sequences, beside those of `sharding.rules`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_3d.context.head_tail import idle_bytes
from lightning_3d.sharding.axis import Axis
from lightning_3d.sharding.placement import REPLICATE_PARTIAL_GRAD, Placement, Shard
from lightning_3d.sharding.rules.attention import Attention
from lightning_3d.sharding.rules.call import PARTIAL, LocalCall, Rule, TorchCall
from lightning_3d.sharding.rules.flex_attention import attend_rows
from lightning_3d.sharding.rules.randomness import draws
from lightning_3d.sharding.sharded_tensor import ShardedTensor


def take_one_row(call: TorchCall, axis: Axis) -> LocalCall | None:
    """``x[:, 0]`` of the sharded dim: the rank that has the row gives it to all."""
    tensor = call.first
    if not isinstance(tensor, ShardedTensor) or not isinstance(at := tensor.placement, Shard):
        return None
    index = _index(call, tensor.dim())
    if index is None or type(index[at.dim]) is not int:
        return None
    length = tensor.shape[at.dim]
    row = index[at.dim] % length
    bounds = at.bounds(length, axis.size)
    owner = next(rank for rank in range(axis.size) if bounds[rank] <= row < bounds[rank + 1])
    is_here = owner == axis.rank

    def run(own: Tensor) -> Tensor:
        if not own.shape[at.dim]:
            own = own.sum(at.dim, keepdim=True)
        index[at.dim] = row - bounds[owner] if is_here else 0
        taken = own[tuple(index)]
        # Not by a product with 0, as rows may hold infinities; and not new zeros, as the backwards of all ranks have to
        # reach the same collectives.
        return taken * 1 if is_here else taken.where(torch.zeros_like(taken, dtype=torch.bool), 0)

    return LocalCall(tensors=(tensor,), input_placements=(at,), run=run, result=PARTIAL)


def _index(call: TorchCall, num_dims: int) -> list[Any] | None:
    """An index of whole numbers and slices, one a dim."""
    if call.name == "select":
        index: list[Any] = [slice(None)] * num_dims
        dim, row = (*call.args[1:], *call.kwargs.values())
        index[dim] = row
        return index
    given = list(call.args[1]) if isinstance(call.args[1], tuple) else [call.args[1]]
    ellipses = [i for i, item in enumerate(given) if item is Ellipsis]
    at = ellipses[0] if ellipses else len(given)
    given[at : at + 1] = [slice(None)] * (num_dims - len(given) + len(ellipses))
    return given if all(type(item) in (int, slice) for item in given) else None


def attend_own_queries(call: TorchCall, axis: Axis) -> LocalCall | None:
    """Attention of this rank's queries to all keys and values."""
    attention = Attention(*call.args, **call.kwargs)
    query, mask = attention.query, attention.attn_mask
    if not isinstance(query, ShardedTensor) or not isinstance(at := query.placement, Shard):
        return None
    is_whole = not isinstance(attention.key, ShardedTensor) and not isinstance(attention.value, ShardedTensor)
    if not is_whole or at.dim != query.dim() - 2 or draws(attention.dropout_p):
        return None
    tensors: tuple[Tensor, ...] = (query, attention.key, attention.value)
    placements: tuple[Placement, ...] = (at, REPLICATE_PARTIAL_GRAD, REPLICATE_PARTIAL_GRAD)
    if mask is not None:
        is_alike = mask.dim() < 2 or mask.shape[-2] == 1
        tensors = (*tensors, mask)
        placements = (*placements, REPLICATE_PARTIAL_GRAD if is_alike else at.at(mask.dim() - 2))
    bounds = at.bounds(query.shape[-2], axis.size)
    first, last = bounds[axis.rank], bounds[axis.rank + 1]

    def run(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None) -> Tensor:
        if attention.is_causal:  # aligned to the upper left, as torch has it: later keys are not read at all
            key, value = key[..., :last, :], value[..., :last, :]
            mask = _causal(first, last, query.device)
        return F.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, scale=attention.scale, enable_gqa=attention.enable_gqa
        )

    idle = idle_bytes(query, axis.size) if attention.is_causal else 0
    return LocalCall(tensors=tensors, input_placements=placements, run=run, result=at, idle=idle)


def _causal(first: int, last: int, device: torch.device) -> Tensor:
    """Which keys before `last` the queries from `first` on read."""
    return torch.arange(first, last, device=device)[:, None] >= torch.arange(last, device=device)


def set_where(call: TorchCall, axis: Axis) -> LocalCall | None:
    """``x[mask] = value`` with one value for all: each rank goes by its part of the mask."""
    tensor, mask, value = call.args if len(call.args) == 3 else (None, None, None)
    if not isinstance(tensor, ShardedTensor) or not isinstance(mask, Tensor) or mask.dtype != torch.bool:
        return None
    at = tensor.placement
    if mask.dim() <= at.dim or (isinstance(value, Tensor) and (value.dim() or isinstance(value, ShardedTensor))):
        return None
    placements: tuple[Placement, ...] = (at, at)
    if isinstance(value, Tensor):
        placements = (*placements, REPLICATE_PARTIAL_GRAD)
    return LocalCall(tensors=call.tensors, input_placements=placements, run=call.run)


RULES: Mapping[str, tuple[Rule, ...]] = {
    "__getitem__": (take_one_row,),
    "__setitem__": (set_where,),
    "select": (take_one_row,),
    "flex_attention": (attend_rows,),
}
