"""``F.scaled_dot_product_attention``, and along which dim ranks can share it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from lightning_3d.tensor.rules.function import Function


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


def as_attention(function: Function, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Attention | None:
    """Read a call as scaled dot product attention, or None."""
    return _attention(*args, **kwargs) if function is F.scaled_dot_product_attention else None


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
        size: Length of the tp axis.
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
