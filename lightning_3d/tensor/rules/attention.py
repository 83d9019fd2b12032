"""``F.scaled_dot_product_attention``, and along which dim ranks can share it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_3d.tensor.axis import Axis
from lightning_3d.tensor.placement import EACH, Placement, Shard
from lightning_3d.tensor.rules.call import Call, LocalCall, on_whole
from lightning_3d.tensor.sharded_tensor import placement_of, shard_dim


@dataclass(frozen=True, kw_only=True, slots=True)
class Attention:
    """The arguments of ``F.scaled_dot_product_attention``; heads are at dim -3."""

    query: Tensor
    """``[..., heads, queries, head_dim]``."""

    key: Tensor
    """``[..., kv_heads, keys, head_dim]``."""

    value: Tensor
    """``[..., kv_heads, keys, value_dim]``."""

    mask: Tensor | None
    dropout_p: float
    is_causal: bool
    scale: float | None
    enable_gqa: bool


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Attention:
    return Attention(
        query=query,
        key=key,
        value=value,
        mask=attn_mask,
        dropout_p=dropout_p,
        is_causal=is_causal,
        scale=scale,
        enable_gqa=enable_gqa,
    )


def attention_dim(
    attention: Attention, query_dim: int | None, key_dim: int | None, value_dim: int | None, *, size: int
) -> int | None:
    """The dim (heads or batch) along which every rank can attend on its own shards, or None.

    Replicated keys and values go with sharded query heads: every rank takes those that its query heads need.

    Args:
        attention: The call.
        query_dim: The dim that the query is sharded on; None if it is replicated.
        key_dim: The same for the key.
        value_dim: The same for the value.
        size: Length of the axis.
    """
    query, key, value = attention.query, attention.key, attention.value
    if query_dim is None or query_dim >= query.dim() - 2 or not query.dim() == key.dim() == value.dim():
        return None
    if query.shape[query_dim] % size:
        return None
    if key_dim == value_dim == query_dim:
        return query_dim if key.shape[key_dim] % size == value.shape[key_dim] % size == 0 else None
    heads_dim = query.dim() - 3
    if key_dim is None and value_dim is None and query_dim == heads_dim:
        heads = query.shape[heads_dim]
        return query_dim if heads % key.shape[heads_dim] == heads % value.shape[heads_dim] == 0 else None
    return None


def mask_dim(attention: Attention, dim: int) -> int | None:
    """The dim of the mask that goes with dim `dim` of the query; None if the mask is broadcast along it."""
    if attention.mask is None:
        return None
    aligned = dim - attention.query.dim() + attention.mask.dim()
    return aligned if aligned >= 0 and attention.mask.shape[aligned] != 1 else None


def attend(call: Call, axis: Axis) -> LocalCall:
    """Attention on this rank's heads (or part of the batch); torch 2.13 has no rule for all of its kernels."""
    attention = _attention(*call.args, **call.kwargs)
    operands: tuple[Tensor, ...] = (attention.query, attention.key, attention.value)
    is_clear = all(placement_of(tensor) is None or shard_dim(tensor) is not None for tensor in operands)
    dim = attention_dim(attention, *map(shard_dim, operands), size=axis.size) if is_clear else None
    if dim is None:
        return on_whole(call)
    needs: list[Placement] = [Shard(dim) if shard_dim(tensor) is not None else EACH for tensor in operands]
    if attention.mask is not None:
        along = mask_dim(attention, dim)
        needs.append(EACH if along is None else Shard(along))  # every rank has a part of the gradient of the whole
        operands = (*operands, attention.mask)
    num_heads = attention.query.shape[dim]

    def run(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None) -> Tensor:
        key, value = (
            _needed_heads(tensor, dim, num_heads, axis) if need == EACH else tensor
            for tensor, need in zip((key, value), needs[1:3], strict=True)
        )
        return F.scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=mask,
            dropout_p=attention.dropout_p,
            is_causal=attention.is_causal,
            scale=attention.scale,
            enable_gqa=attention.enable_gqa,
        )

    is_random = attention.dropout_p > 0
    return LocalCall(tensors=operands, needs=tuple(needs), run=run, result=Shard(dim), is_random=is_random)


def _needed_heads(tensor: Tensor, dim: int, num_heads: int, axis: Axis) -> Tensor:
    """The heads of replicated keys or values that this rank's query heads need."""
    per_head, num_own = num_heads // tensor.shape[dim], num_heads // axis.size
    first = axis.rank * num_own
    if num_own % per_head and per_head % num_own:  # the own query heads need unequal numbers of keys
        heads = torch.arange(first, first + num_own, device=tensor.device) // per_head
        return tensor.index_select(dim, heads)
    return tensor.narrow(dim, first // per_head, max(num_own // per_head, 1))
