"""Calls that every rank makes on its own channels: norms over a channel or a group of them, pooling, resizing, padding.

They do to every channel the same, or the same with that channel's element of a vector. DTensor has rules for some of
them; here is one table for all.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from lightning_3d.sharding.axis import Axis
from lightning_3d.sharding.placement import Shard
from lightning_3d.sharding.rules.call import InputPlacement, LocalCall, RunningStatistic, TorchCall, on_whole
from lightning_3d.sharding.rules.function import Function, function_name
from lightning_3d.sharding.sharded_tensor import shard_dim


def on_channels(call: TorchCall, axis: Axis) -> LocalCall | None:
    """A call on this rank's channels, or on full tensors if it has to be."""
    channels = as_channel_call(call, axis.size)
    if channels is None:
        return None
    if channels.dim is None:
        return on_whole(call)
    own = channels.call
    statistic, along = RunningStatistic(channels.changes_statistics), Shard(channels.dim)

    def input_placement(tensor: Tensor) -> InputPlacement:
        if any(tensor is buffer for buffer in channels.statistics):
            return statistic
        return Shard(0) if any(tensor is vector for vector in channels.vectors) else along

    return LocalCall(
        tensors=own.tensors,
        input_placements=tuple(input_placement(tensor) for tensor in own.tensors),
        run=own.run,
        result=along,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class ChannelCall:
    """How a rank makes one call on its own channels."""

    call: TorchCall
    """With full tensors; counts of channels are already those of one rank."""

    dim: int | None
    """The dim that input and result are sharded on; None: the call needs full tensors."""

    vectors: tuple[Tensor, ...] = ()
    """Arguments with one element per channel."""

    statistics: tuple[Tensor, ...] = ()
    """Buffers with one element per channel, which the call reads."""

    changes_statistics: bool = False


def as_channel_call(call: TorchCall, size: int) -> ChannelCall | None:
    """Read a call, one of whose tensors is sharded over `size` ranks; None for one that is not on own channels."""
    if call.function not in _CALLS:
        return None
    if call.function in _NORMS:
        return _norm(call, size)
    input: Any = call.first if call.args else call.kwargs.get("input")
    if (dim := shard_dim(input)) is None:
        return None
    if call.function is F.prelu:
        slopes = call.args[1] if len(call.args) > 1 else call.kwargs["weight"]
        has_own = dim == 1 and slopes.numel() == input.shape[1]
        return ChannelCall(call=call, dim=dim, vectors=(slopes,)) if has_own else None
    return ChannelCall(call=call, dim=dim) if _is_independent(call, input, dim) else None


_POOLINGS = (
    "max_pool{}d",
    "max_pool{}d_with_indices",
    "avg_pool{}d",
    "lp_pool{}d",
    "adaptive_max_pool{}d",
    "adaptive_max_pool{}d_with_indices",
    "adaptive_avg_pool{}d",
)

_ALONG: Mapping[Function, int] = {getattr(F, name.format(dims)): dims for name in _POOLINGS for dims in (1, 2, 3)}
"""Function -> how many last dims it works along."""

_NORMS: frozenset[Function] = frozenset({F.batch_norm, F.instance_norm, F.group_norm})

_OTHERS: frozenset[Function] = frozenset({F.prelu, F.interpolate, F.pad})

_CALLS = _NORMS | _OTHERS | _ALONG.keys()

NAMES = tuple({function_name(function) for function in _CALLS})

_WITH_OPTIONS: Sequence[Function] = (*_NORMS, F.pad)

_SIGNATURES = {function: inspect.signature(function) for function in _WITH_OPTIONS}


def _is_independent(call: TorchCall, input: Tensor, dim: int) -> bool:
    """Whether a call works along other dims than the sharded one."""
    if call.function in _ALONG:
        return dim < input.dim() - _ALONG[call.function]
    if call.function is F.interpolate:
        return dim < 2
    num_padded: int = len(_arguments(call)["pad"]) // 2
    return dim < input.dim() - num_padded


def _norm(call: TorchCall, size: int) -> ChannelCall:
    given = _arguments(call)
    changes = given.get("training") or given.get("use_input_stats")
    is_local = shard_dim(given["input"]) == 1
    if call.function is F.group_norm:
        is_local = is_local and given["num_groups"] % size == 0
        given["num_groups"] //= size if is_local else 1
    statistics = tuple(given[name] for name in ("running_mean", "running_var") if given.get(name) is not None)
    return ChannelCall(
        call=TorchCall(call.function, call.name, (), given),
        dim=1 if is_local else None,
        vectors=tuple(given[name] for name in ("weight", "bias") if given[name] is not None),
        statistics=statistics,
        changes_statistics=bool(changes and statistics),
    )


def _arguments(call: TorchCall) -> dict[str, Any]:
    bound = _SIGNATURES[call.function].bind(*call.args, **call.kwargs)
    bound.apply_defaults()
    return bound.arguments
