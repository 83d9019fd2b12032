"""Sequence-parallel regions of a block: norms, dropout and residuals work on a slice of the sequence.

A block's input is cut along its sequence, every rank keeps one slice, and each all-reduce becomes a reduce-scatter
after a row weight and an all-gather before a column weight (Korthikanti et al. 2022, https://arxiv.org/abs/2205.05198).
The result of the all-gather is not kept for the backward, which gathers again.

    x ---> slice ---> norm ---> all-gather ---> column ... row ---> reduce-scatter ---> + ---> all-gather ---> y

Planning (`simulate`) and running (`sharded_forward`) cut the same inputs, by the functions here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

SEQUENCE_DIM = 1
"""The dim of the sequence in activations of shape (B, T, D)."""


def sequence_input(args: Sequence[Any], size: int) -> Tensor | None:
    """The argument of a block that is cut along its sequence: the first, if it is (B, T, D) and `size` divides T."""
    first = args[0] if args else None
    if not isinstance(first, Tensor) or not first.is_floating_point() or first.dim() != 3:
        return None
    return None if first.shape[SEQUENCE_DIM] % size else first


def is_along(tensor: Tensor, sequence: torch.Size | None) -> bool:
    """Whether a tensor of full shape (B, T, ...) lies along the sequence of a block's input of shape `sequence`."""
    return sequence is not None and tensor.dim() == 3 and tensor.shape[:2] == sequence[:2]
