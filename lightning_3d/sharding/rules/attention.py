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
from lightning_3d.sharding.sharded_tensor import placement_of
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

    def shared(self) -> tuple[Shard, Placement, Placement] | None:
        """How query, key and value must lie so that each rank can attend on its own heads, or part of the batch.

        Replicated keys and values go with sharded query heads: every rank takes those that its query heads need. Else
        query heads go where their keys and values are. None if there is no such way.
        """
        query, key, value = operands = self.query, self.key, self.value
        at, of_key, of_value = map(placement_of, operands)
        if not isinstance(at, Shard) or not query.dim() == key.dim() == value.dim() or at.dim >= query.dim() - 2:
            return None
        dim, is_heads = at.dim, at.dim == query.dim() - 3
        if isinstance(of_key, Shard) and of_key == of_value and of_key.dim == dim:
            ratio = query.shape[dim] // key.shape[dim]
            return (of_key.scaled(dim, ratio), of_key, of_value) if is_heads or ratio == 1 else None
        heads, is_plain = query.shape[dim], of_key is None and of_value is None
        if not is_plain or not is_heads or heads % key.shape[dim] or heads % value.shape[dim]:
            return None
        return at, REPLICATE_PARTIAL_GRAD, REPLICATE_PARTIAL_GRAD

    def mask_need(self, mask: Tensor, at: Shard) -> Placement:
        """How the mask must lie if the query lies so: alike, or whole if it is broadcast along the sharded dim."""
        along = at.dim - self.query.dim() + mask.dim()
        # Every rank has a part of the gradient of the whole.
        return at.at(along) if along >= 0 and mask.shape[along] != 1 else REPLICATE_PARTIAL_GRAD


def attend(call: TorchCall, axis: Axis) -> LocalCall:
    """Attention on this rank's heads (or part of the batch); torch 2.13 has no rule for all of its kernels."""
    attention = Attention(*call.args, **call.kwargs)
    shared = attention.shared()
    if shared is None:
        return on_whole(call)
    operands: tuple[Tensor, ...] = (attention.query, attention.key, attention.value)
    at, input_placements = shared[0], list[Placement](shared)
    if attention.attn_mask is not None:
        input_placements.append(attention.mask_need(attention.attn_mask, at))
        operands = (*operands, attention.attn_mask)
    bounds = at.bounds(attention.query.shape[at.dim], axis.size)
    num_heads, own = bounds[-1], range(bounds[axis.rank], bounds[axis.rank + 1])
    options = {name: getattr(attention, name) for name in ("dropout_p", "is_causal", "scale", "enable_gqa")}

    def run(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None) -> Tensor:
        key, value = (
            needed_heads(tensor, at.dim, num_heads, own) if input_placement == REPLICATE_PARTIAL_GRAD else tensor
            for tensor, input_placement in zip((key, value), input_placements[1:3], strict=True)
        )
        if not draws(attention.dropout_p):
            return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, **options)
        if not drops_by_itself(query.device):
            return _with_drops(query, key, value, mask, at, axis, options)
        if axis.rank == 0:
            warnings.warn(_OTHER_NUMBERS, stacklevel=2)
        with seeded_for_rank(query.device, axis.rank):
            return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, **options)

    return LocalCall(tensors=operands, input_placements=tuple(input_placements), run=run, result=at)


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


def needed_heads(tensor: Tensor, dim: int, num_heads: int, own: range) -> Tensor:
    """The heads of replicated keys or values that this rank's query heads need."""
    per_head = num_heads // tensor.shape[dim]
    needed = [head // per_head for head in own]
    first, count = min(needed, default=0), len(set(needed))
    if needed != [first + i * count // len(own) for i in range(len(own))]:  # they need unequal numbers of keys
        return tensor.index_select(dim, torch.tensor(needed, device=tensor.device))
    return tensor.narrow(dim, first, count)
