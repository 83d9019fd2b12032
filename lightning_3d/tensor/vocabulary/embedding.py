"""Looking rows up in an embedding table whose rows are sharded over the tp axis (Megatron-LM, Shoeybi et al. 2019)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor

from lightning_3d.sharding.axis import MeshAxis
from lightning_3d.sharding.collectives import redistribute
from lightning_3d.sharding.placement import REPLICATE
from lightning_3d.sharding.rules.call import PARTIAL
from lightning_3d.sharding.rules.function import Function
from lightning_3d.tensor.own_shard import own_shard
from lightning_3d.tensor.vocabulary.sharded_classes import shard_bounds


@dataclass(frozen=True, slots=True)
class Embedding:
    """The arguments of ``F.embedding``, by the same names."""

    input: Tensor
    """Ids ``[...]``, integers."""

    weight: Tensor
    """``[rows, width]``."""

    padding_idx: int | None = None
    """The row that gets no gradient; may count from the end."""

    max_norm: float | None = None
    norm_type: float = 2.0
    scale_grad_by_freq: bool = False
    sparse: bool = False


def as_embedding(function: Function, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Embedding | None:
    """Read a call as an embedding that can run on shards of the table, or None."""
    call = Embedding(*args, **kwargs) if function is F.embedding else None
    if call is None or call.max_norm is not None or call.scale_grad_by_freq or call.sparse:
        return None  # they change rows in place, count rows, or make gradients that are not dense
    return call


def look_up(call: Embedding, axis: MeshAxis) -> Tensor:
    """The rows of the ids, ``[..., width]``, plain: own rows, zeros for those of others, and one all-reduce."""
    assert isinstance(call.weight, DTensor)
    num_rows, ids = call.weight.shape[0], call.input
    start, stop = shard_bounds(num_rows, axis.mesh)
    is_own = (ids >= start) & (ids < stop)
    # An id beyond the table is out of bounds on every rank, as it is in one process.
    is_invalid = (ids < 0) | (ids >= num_rows)
    index = torch.where(is_own, ids - start, torch.where(is_invalid, stop - start, 0))
    padding = None if call.padding_idx is None else call.padding_idx % num_rows - start
    if padding is not None and not 0 <= padding < stop - start:
        padding = None
    rows = F.embedding(index, own_shard(call.weight), padding_idx=padding)
    return redistribute(rows.masked_fill(~is_own.unsqueeze(-1), 0.0), axis, PARTIAL, REPLICATE)
