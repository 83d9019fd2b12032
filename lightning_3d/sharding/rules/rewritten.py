"""Functions that torch hands over as one call, in calls that have sharded forms.

``F.multi_head_attention_forward``, what ``nn.MultiheadAttention`` calls, flattens the batch and its heads into one dim;
here it works on ``[batch, heads, ...]``. Of ``F.glu`` the two halves of the input are the parts of one projection.
Losses with a reduction are sums of rows over a count (`losses`). Planning and execution run these in their place.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_3d.sharding.rules.function import Function
from lightning_3d.sharding.rules.losses import as_rows_over_count

_SIGNATURE = inspect.signature(F.multi_head_attention_forward)

_UNSUPPORTED = ("bias_k", "bias_v", "add_zero_attn", "static_k", "static_v")


def rewritten(function: Function, args: Sequence[object], kwargs: Mapping[str, object]) -> Function | None:
    """A function with the same arguments and results, for a call that has to be rewritten."""
    if function is F.glu:
        return gated
    if function is not F.multi_head_attention_forward:
        return as_rows_over_count(function, args, kwargs)
    arguments = _SIGNATURE.bind(*args, **kwargs).arguments
    is_supported = all(arguments.get(name) in (None, False) for name in _UNSUPPORTED)
    return multi_head_attention if is_supported else None


def gated(input: Tensor, dim: int = -1) -> Tensor:
    """The same arguments and result as ``F.glu``."""
    values, gates = input.chunk(2, dim)
    return values * gates.sigmoid()


def multi_head_attention(*args: object, **kwargs: object) -> tuple[Tensor, Tensor | None]:
    """The same arguments and results as ``F.multi_head_attention_forward``."""
    bound = _SIGNATURE.bind(*args, **kwargs)
    bound.apply_defaults()
    call = bound.arguments
    projections = _projections(call)
    is_batched = call["query"].dim() == 3
    query, key, value = (p if is_batched else p.unsqueeze(1) for p in projections)  # [length, batch, width]
    num_heads = call["num_heads"]
    q, k, v = (t.unflatten(-1, (num_heads, -1)).permute(1, 2, 0, 3) for t in (query, key, value))
    mask, is_causal = _mask(call, batch=query.shape[1])
    dropout_p = call["dropout_p"] if call["training"] else 0.0
    weights = None
    if call["need_weights"]:
        attended, weights = _attention_with_weights(q, k, v, mask, dropout_p)
        weights = weights.mean(1) if call["average_attn_weights"] else weights
        weights = weights if is_batched else weights.squeeze(0)
    else:
        attended = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=dropout_p, is_causal=is_causal)
    output = F.linear(attended.permute(2, 0, 1, 3).flatten(2), call["out_proj_weight"], call["out_proj_bias"])
    return output if is_batched else output.squeeze(1), weights


def _projections(call: Mapping[str, Any]) -> Sequence[Tensor]:
    query, key, value = call["query"], call["key"], call["value"]
    bias = call["in_proj_bias"]
    if not call["use_separate_proj_weight"] and query is key and key is value:
        return F.linear(query, call["in_proj_weight"], bias).chunk(3, -1)
    if call["use_separate_proj_weight"]:
        weights = [call["q_proj_weight"], call["k_proj_weight"], call["v_proj_weight"]]
    else:
        weights = call["in_proj_weight"].chunk(3)
    biases = [None] * 3 if bias is None else bias.chunk(3)
    return [F.linear(t, w, b) for t, w, b in zip((query, key, value), weights, biases, strict=True)]


def _mask(call: Mapping[str, Any], *, batch: int) -> tuple[Tensor | None, bool]:
    """The mask added to the scores, broadcastable to ``[batch, heads, queries, keys]``, and the hint ``is_causal``."""
    mask, padding, is_causal = call["attn_mask"], call["key_padding_mask"], call["is_causal"]
    if is_causal and mask is None:
        raise RuntimeError("Need attn_mask if specifying the is_causal hint.")
    if is_causal and padding is None and not call["need_weights"]:
        return None, True
    if mask is not None:
        mask = _added(mask, call["query"].dtype)
        mask = mask.view(batch, call["num_heads"], *mask.shape[-2:]) if mask.dim() == 3 else mask[None, None]
    if padding is not None:
        padding = _added(padding, call["query"].dtype).view(batch, 1, 1, -1)
        mask = padding if mask is None else mask + padding
    return mask, is_causal and padding is None


def _added(mask: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.zeros_like(mask, dtype=dtype).masked_fill_(mask, float("-inf")) if mask.dtype == torch.bool else mask


def _attention_with_weights(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, dropout_p: float
) -> tuple[Tensor, Tensor]:
    scores = (query / query.shape[-1] ** 0.5) @ key.transpose(-2, -1)
    weights = (scores if mask is None else scores + mask).softmax(-1)
    weights = F.dropout(weights, dropout_p) if dropout_p else weights
    return weights @ value, weights
