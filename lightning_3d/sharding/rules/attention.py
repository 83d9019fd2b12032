"""``F.scaled_dot_product_attention``, and along which dim ranks can share it.

With dropout torch computes on a CPU by products and a softmax, and drops probabilities as any other tensor; here every
rank drops those of its own heads alike (`randomness`). Fused kernels of other devices draw while they compute, from
positions among the heads that they see: there the ranks draw other numbers than one process, and a warning says so.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_3d.sharding.axis import Axis
from lightning_3d.sharding.placement import REPLICATE_PARTIAL_GRAD, Placement, Shard
from lightning_3d.sharding.rules.call import LocalCall, TorchCall, on_whole
from lightning_3d.sharding.rules.randomness import apply_drops, draws, own_drops, seeded_for_rank
from lightning_3d.sharding.sharded_tensor import placement_of, shard_dim
from lightning_3d.torch_internals.attention import attention_weights, drops_by_itself


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
        return Shard(along) if along >= 0 and mask.shape[along] != 1 else REPLICATE_PARTIAL_GRAD


def attend(call: TorchCall, axis: Axis) -> LocalCall:
    """Attention on this rank's heads (or part of the batch); torch 2.13 has no rule for all of its kernels."""
    attention = Attention(*call.args, **call.kwargs)
    dim = attention.shared_dim(axis.size)
    if dim is None:
        return on_whole(call)
    operands: tuple[Tensor, ...] = (attention.query, attention.key, attention.value)
    input_placements: list[Placement] = [
        REPLICATE_PARTIAL_GRAD if placement_of(tensor) is None else Shard(dim) for tensor in operands
    ]
    if attention.attn_mask is not None:
        input_placements.append(attention.mask_need(attention.attn_mask, dim))
        operands = (*operands, attention.attn_mask)
    num_heads = attention.query.shape[dim]
    options = {name: getattr(attention, name) for name in ("dropout_p", "is_causal", "scale", "enable_gqa")}

    def run(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None) -> Tensor:
        key, value = (
            _needed_heads(tensor, dim, num_heads, axis) if input_placement == REPLICATE_PARTIAL_GRAD else tensor
            for tensor, input_placement in zip((key, value), input_placements[1:3], strict=True)
        )
        if not draws(attention.dropout_p):
            return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, **options)
        if not drops_by_itself(query.device):
            return _with_drops(query, key, value, mask, Shard(dim), axis, options)
        if axis.rank == 0:
            warnings.warn(_OTHER_NUMBERS, stacklevel=2)
        with seeded_for_rank(query.device, axis.rank):
            return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, **options)

    return LocalCall(tensors=operands, input_placements=tuple(input_placements), run=run, result=Shard(dim))


_OTHER_NUMBERS = (
    "scaled_dot_product_attention drops probabilities of sharded heads: kernels of this device draw other"
    " numbers for each rank's heads than one process draws. Attention that calls F.dropout itself (in transformers:"
    " attn_implementation='eager') drops what one process drops."
)


def _with_drops(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    at: Shard,
    axis: Axis,
    options: Mapping[str, Any],
) -> Tensor:
    """Attention on this rank's part, as torch computes it without a fused kernel; it holds all probabilities."""
    weights, value = attention_weights(query, key, value, mask, options)
    drops = own_drops(weights, at, axis, options["dropout_p"], is_fused=False)
    attended = apply_drops(weights, drops, options["dropout_p"]) @ value
    return attended.to(query.dtype)


def _needed_heads(tensor: Tensor, dim: int, num_heads: int, axis: Axis) -> Tensor:
    """The heads of replicated keys or values that this rank's query heads need."""
    per_head, num_own = num_heads // tensor.shape[dim], num_heads // axis.size
    first = axis.rank * num_own
    if num_own % per_head and per_head % num_own:  # the own query heads need unequal numbers of keys
        heads = torch.arange(first, first + num_own, device=tensor.device) // per_head
        return tensor.index_select(dim, heads)
    return tensor.narrow(dim, first // per_head, max(num_own // per_head, 1))
