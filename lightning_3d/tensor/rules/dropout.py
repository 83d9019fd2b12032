"""Elementwise dropout."""

from __future__ import annotations

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor

from lightning_3d.tensor.axis import Axis
from lightning_3d.tensor.placement import Sharded
from lightning_3d.tensor.randomness import dropout_shard
from lightning_3d.tensor.rules.call import Call, LocalCall
from lightning_3d.tensor.sharded_tensor import placement_of


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


def drop(call: Call, axis: Axis) -> LocalCall | None:
    """Every rank drops elements of its own part."""
    read = _functional_dropout if call.function is F.dropout else _torch_dropout
    dropout = read(*call.args, **call.kwargs)
    at = placement_of(dropout.input)
    if not isinstance(at, Sharded):
        return None

    def run(input: Tensor) -> Tensor:
        return dropout_shard(input, dropout.p, axis.rank) if dropout.training else input

    return LocalCall(tensors=(dropout.input,), needs=(at,), run=run, result=at)
