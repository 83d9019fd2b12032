"""Attention to a part of the keys and values, with the log-sum-exp by which such parts merge, and its backward.

``F.scaled_dot_product_attention`` calls the same kernels, and gives their output alone. On CUDA that of flash attention
computes in 16 bits, the memory-efficient one in 32.
"""

from __future__ import annotations

from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_3d.torch_internals.tensors import HALVES

_aten = torch.ops.aten

_EFFICIENT_ROWS = 32
"""The memory-efficient kernel gives the log-sum-exp of a multiple of so many queries."""


def allowed_kernels() -> tuple[bool, bool]:
    """Whether ``sdpa_kernel`` and torch's flags leave flash attention and the memory-efficient kernel on."""
    return torch.backends.cuda.flash_sdp_enabled(), torch.backends.cuda.mem_efficient_sdp_enabled()


def has_kernel(device: torch.device, dtype: torch.dtype, head_dim: int) -> bool:
    """Whether a device has a kernel that gives the log-sum-exp, and torch is allowed to use it."""
    flash, efficient = allowed_kernels()
    if device.type == "cpu":
        return flash and dtype in (torch.float64, torch.float32, *HALVES)
    if device.type != "cuda" or head_dim % 8:
        return False
    if dtype in HALVES:
        return flash and head_dim <= 256 and torch.cuda.get_device_capability(device) >= (8, 0)
    return efficient and dtype == torch.float32


def attend(query: Tensor, key: Tensor, value: Tensor, *, is_causal: bool, scale: float | None) -> tuple[Tensor, Tensor]:
    """The output, and the log-sum-exp of each query's scores.

    Args:
        query: ``[batch, heads, queries, head_dim]``.
        key: ``[batch, kv_heads, keys, head_dim]``; `kv_heads` divides `heads`.
        value: As `key`.

    Returns:
        ``[batch, heads, queries, head_dim]`` and ``[batch, heads, queries]``, which has at least 32 bits.
    """
    if query.device.type == "cpu":
        output, lse = _aten._scaled_dot_product_flash_attention_for_cpu(query, key, value, 0.0, is_causal, scale=scale)
        return output, lse
    if query.dtype in HALVES:
        output, lse, *_ = _aten._scaled_dot_product_flash_attention(query, key, value, 0.0, is_causal, scale=scale)
        return output, lse
    key, value = (_repeated(tensor, query.shape[1]) for tensor in (key, value))
    output, lse, *_ = _aten._scaled_dot_product_efficient_attention(
        query, key, value, None, True, 0.0, is_causal, scale=scale
    )
    return output, lse[..., : query.shape[2]]


def attend_backward(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    lse: Tensor,
    *,
    is_causal: bool,
    scale: float | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of query, key and value: of these keys' and values' part in an attention to them and to others.

    Args:
        gradient: Of `output`.
        output: Of the whole attention.
        lse: Of the whole attention; contiguous.
    """
    operands, length = (gradient, query, key, value, output), query.shape[2]
    if query.device.type == "cpu":
        found = _aten._scaled_dot_product_flash_attention_for_cpu_backward(*operands, lse, 0.0, is_causal, scale=scale)
        return cast(tuple[Tensor, Tensor, Tensor], found)
    drawn = torch.empty(0, dtype=torch.long, device=query.device)  # the state of random numbers: nothing is dropped
    if query.dtype in HALVES:
        found = _aten._scaled_dot_product_flash_attention_backward(
            *operands, lse, None, None, length, key.shape[2], 0.0, is_causal, drawn, drawn, scale=scale
        )
        return cast(tuple[Tensor, Tensor, Tensor], found)
    key, value = (_repeated(tensor, query.shape[1]) for tensor in (key, value))
    padded = F.pad(lse, (0, -length % _EFFICIENT_ROWS), value=float("inf"))  # so that these rows weigh nothing
    of_query, *of_both, _ = _aten._scaled_dot_product_efficient_attention_backward(
        *(gradient, query, key, value, None, output, padded, drawn, drawn),
        *(0.0, [True, True, True, False], is_causal),
        scale=scale,
    )
    kv_heads = operands[2].shape[1]
    of_key, of_value = (tensor.unflatten(1, (kv_heads, -1)).sum(2) for tensor in of_both)
    return of_query, of_key, of_value


def _repeated(tensor: Tensor, num_heads: int) -> Tensor:
    """Keys or values with as many heads as the queries have."""
    return tensor.repeat_interleave(num_heads // tensor.shape[1], 1)
