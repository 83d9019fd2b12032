"""Running statistics of norms: what a call does to them, and what one call on the whole batch would have done.

A call updates them by what it sees. The variance is unbiased: that of n values of a channel is divided by n - 1.

    mean = (1 - momentum) mean + momentum m
    var  = (1 - momentum) var  + momentum v

Of microbatches with n_i values of a channel, means m_i and variances v_i, a batch of N values has

    m = sum(n_i m_i) / N
    v = (sum((n_i - 1) v_i) + sum(n_i (m_i - m)^2)) / (N - 1)

Instance norms take the mean over samples of their means and variances instead. The idea is torchgpipe's deferred batch
normalization (https://arxiv.org/abs/2004.09910); nothing is computed of the inputs that a norm does not compute anyway.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain, repeat

import torch
from torch import Tensor

from lightning_3d.torch_internals.modules import BatchNorm, RunningNorm, buffers_of
from lightning_3d.torch_internals.tensors import widened

_MEAN, _VAR, _TRACKED = "running_mean", "running_var", "num_batches_tracked"

State = Mapping[str, Tensor]
"""Buffer -> its value."""


@dataclass(frozen=True, kw_only=True)
class NormCall:
    """One call of a norm on a microbatch."""

    before: State
    after: State
    count: int
    """Values of a channel, or samples of an instance norm."""
    times: int
    """How often it counts."""
    ran: bool
    """Whether it ran here, not on another stage."""


@dataclass(frozen=True, kw_only=True)
class Seen:
    """Mean and variance that one call on the whole batch would have seen."""

    mean: Tensor | None
    """None where the norm does not update its statistics, whose momentum is 0."""
    var: Tensor | None
    tracked: Tensor | None
    """How much the number of batches grows."""
    times: int


def updates_statistics(norm: RunningNorm) -> bool:
    """Whether a call now would update running statistics."""
    if norm.running_mean is None:
        return False
    if isinstance(norm, BatchNorm):
        return norm.training and norm.track_running_stats
    return norm.training or not norm.track_running_stats


def state_of(norm: RunningNorm) -> dict[str, Tensor]:
    """Its running statistics."""
    buffers = buffers_of(norm)
    return {name: buffer for name in (_MEAN, _VAR, _TRACKED) if (buffer := buffers.get(name)) is not None}


def copied(state: State) -> dict[str, Tensor]:
    """The same in memory of its own."""
    return {name: buffer.clone() for name, buffer in state.items()}


@contextmanager
def on_copies(norm: RunningNorm, state: State) -> Iterator[State]:
    """Let a norm work on copies of these running statistics inside; yields what they are in the end."""
    buffers, present, copies = buffers_of(norm), state_of(norm), copied(state)
    buffers.update(copies)
    try:
        yield copies
    finally:
        copies.update(state_of(norm))
        buffers.update(present)


def seen(norm: RunningNorm, calls: Sequence[NormCall]) -> Seen:
    """Join a call on every microbatch."""
    first, momentum = calls[0], _momentum(norm, calls[0].after)
    tracked = first.after[_TRACKED] - first.before[_TRACKED] if _TRACKED in first.after else None
    if not momentum:
        return Seen(mean=None, var=None, tracked=tracked, times=first.times)
    means = torch.stack([_of_microbatch(call, _MEAN, momentum) for call in calls])
    variances = torch.stack([_of_microbatch(call, _VAR, momentum) for call in calls])
    counts = torch.tensor([[call.count] for call in calls], dtype=means.dtype, device=means.device)
    total = counts.sum()
    mean = (counts * means).sum(0) / total
    if isinstance(norm, BatchNorm):
        squares = (counts - 1) * variances + counts * (means - mean).square()
        var = squares.sum(0) / (total - 1)
    else:
        var = (counts * variances).sum(0) / total
    return Seen(mean=mean, var=var, tracked=tracked, times=first.times)


def updated(norm: RunningNorm, state: State, batches: Sequence[Seen]) -> dict[str, Tensor]:
    """The running statistics after calls that saw these, in order."""
    now = {name: widened(buffer) for name, buffer in state.items()}
    for batch in chain.from_iterable(repeat(batch, batch.times) for batch in batches):
        if batch.tracked is not None:
            now[_TRACKED] = now[_TRACKED] + batch.tracked.to(now[_TRACKED].device)
        if batch.mean is not None and batch.var is not None:
            momentum = _momentum(norm, now)
            now[_MEAN] = now[_MEAN].lerp(batch.mean.to(now[_MEAN].device), momentum)
            now[_VAR] = now[_VAR].lerp(batch.var.to(now[_VAR].device), momentum)
    return now


def _momentum(norm: RunningNorm, after: State) -> float:
    """The weight of what a call sees; a cumulative average's depends on how many there were, this one included."""
    if norm.momentum is not None:
        return norm.momentum
    return 1 / float(after[_TRACKED]) if isinstance(norm, BatchNorm) and _TRACKED in after else 0.0


def _of_microbatch(call: NormCall, name: str, momentum: float) -> Tensor:
    """The mean or variance that it saw."""
    return (widened(call.after[name]) - (1 - momentum) * widened(call.before[name])) / momentum
