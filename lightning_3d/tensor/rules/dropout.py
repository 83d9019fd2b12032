"""Elementwise dropout."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_3d.tensor.rules.function import Function


@dataclass(frozen=True, kw_only=True, slots=True)
class Dropout:
    """The arguments of ``F.dropout``."""

    input: Tensor
    p: float
    training: bool


def _functional_dropout(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Dropout:
    return Dropout(input=input, p=p, training=training)  # the result is used, so in place or not is the same


def _torch_dropout(input: Tensor, p: float, train: bool) -> Dropout:
    return Dropout(input=input, p=p, training=train)


def as_dropout(function: Function, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Dropout | None:
    """Read a call as elementwise dropout, or None."""
    if function is F.dropout:
        return _functional_dropout(*args, **kwargs)
    return _torch_dropout(*args, **kwargs) if function is torch.dropout else None
