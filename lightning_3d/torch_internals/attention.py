"""The probabilities behind ``F.scaled_dot_product_attention``, as torch computes them where no kernel is fused."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from lightning_3d.torch_internals.tensors import HALVES


def drops_by_itself(device: torch.device) -> bool:
    """Whether kernels of a device draw the numbers of dropout while they compute; CPUs use none of them then."""
    return device.type != "cpu"


def attention_weights(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, options: Mapping[str, Any]
) -> tuple[Tensor, Tensor]:
    """The probabilities before dropout, and the values that they weigh, both in the dtype that torch computes with.

    Args:
        query: ``[..., heads, queries, head_dim]``.
        key: ``[..., kv_heads, keys, head_dim]``.
        value: ``[..., kv_heads, keys, value_dim]``.
        mask: As for ``F.scaled_dot_product_attention``.
        options: ``is_causal``, ``scale`` and ``enable_gqa`` of it; others are left out.

    Returns:
        ``[..., heads, queries, keys]`` and ``[..., heads, keys, value_dim]``.
    """
    is_short = query.dtype in HALVES
    if is_short and not torch.backends.cuda.fp16_bf16_reduction_math_sdp_allowed():
        query, key, value = query.float(), key.float(), value.float()
    if mask is not None and mask.dtype == torch.bool:
        mask = torch.zeros_like(mask, dtype=query.dtype).masked_fill_(mask.logical_not(), float("-inf"))
    no_values = value[..., :0]  # of which the product takes no time
    weights = torch._scaled_dot_product_attention_math(
        query,
        key,
        no_values,
        mask,
        is_causal=options["is_causal"],
        scale=options["scale"],
        enable_gqa=options["enable_gqa"],
    )[1]
    if options["enable_gqa"]:
        value = value.repeat_interleave(weights.shape[-3] // value.shape[-3], -3)
    return weights, value
