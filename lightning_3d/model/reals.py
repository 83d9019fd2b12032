"""Complex numbers as pairs of real ones, for comparisons: converting them to a real dtype drops the imaginary part."""

from __future__ import annotations

import torch
from torch import Tensor


def as_reals(tensor: Tensor) -> Tensor:
    """The tensor itself, or the real and imaginary parts of a complex one, (..., 2)."""
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
