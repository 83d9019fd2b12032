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


@dataclass(frozen=True, slots=True)
class Attention:
    """The arguments of ``F.scaled_dot_product_attention``, by the same names; heads are at dim -3."""

    query: Tensor
    """``[..., heads, queries, head_dim]``."""

    key: Tensor
    """``[..., kv_heads, keys, head_dim]``."""

    value: Tensor
    """``[..., kv_heads, keys, value_dim]``."""

    attn_mask: Tensor | None = None
    dropout_p: float = 0.0
    is_causal: bool = False
    scale: float | None = None
    enable_gqa: bool = False

    def shared_dim(self, size: int) -> int | None:
        """The dim (heads or batch) along which each of `size` ranks can attend on its own shards, or None.

        Replicated keys and values go with sharded query heads: every rank takes those that its query heads need.
        """
        query, key, value = operands = self.query, self.key, self.value
        if any(placement_of(tensor) is not None and shard_dim(tensor) is None for tensor in operands):
            return None
        dim, key_dim, value_dim = map(shard_dim, operands)
        if dim is None or dim >= query.dim() - 2 or not query.dim() == key.dim() == value.dim():
            return None
        if key_dim == value_dim == dim:
            return dim if all(tensor.shape[dim] % size == 0 for tensor in operands) else None
        heads = query.shape[dim]
        if key_dim is not None or value_dim is not None or dim != query.dim() - 3 or heads % size:
            return None
        return dim if heads % key.shape[dim] == heads % value.shape[dim] == 0 else None

    def mask_need(self, mask: Tensor, dim: int) -> Placement:
        """How the mask must lie if the query is sharded on `dim`: alike, or whole if it is broadcast along it."""
        along = dim - self.query.dim() + mask.dim()
        # Every rank has a part of the gradient of the whole.
        return Shard(along) if along >= 0 and mask.shape[along] != 1 else EACH


def attend(call: Call, axis: Axis) -> LocalCall:
    """Attention on this rank's heads (or part of the batch); torch 2.13 has no rule for all of its kernels."""
    attention = Attention(*call.args, **call.kwargs)
    dim = attention.shared_dim(axis.size)
    if dim is None:
        return on_whole(call)
    operands: tuple[Tensor, ...] = (attention.query, attention.key, attention.value)
    needs: list[Placement] = [EACH if placement_of(tensor) is None else Shard(dim) for tensor in operands]
    if attention.attn_mask is not None:
        needs.append(attention.mask_need(attention.attn_mask, dim))
        operands = (*operands, attention.attn_mask)
    num_heads = attention.query.shape[dim]
    options = {name: getattr(attention, name) for name in ("dropout_p", "is_causal", "scale", "enable_gqa")}

    def run(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None) -> Tensor:
        key, value = (
            _needed_heads(tensor, dim, num_heads, axis) if need == EACH else tensor
            for tensor, need in zip((key, value), needs[1:3], strict=True)
        )
        return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, **options)

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
