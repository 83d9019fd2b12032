"""What must be known of a tensor to make room for it before it arrives from another rank or a file."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class TensorInfo:
    """Shape and dtype of a full tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @staticmethod
    def of(value: object) -> TensorInfo | None:
        """That of `value`; None if it is not a tensor."""
        return TensorInfo(shape=tuple(value.shape), dtype=value.dtype) if isinstance(value, Tensor) else None
