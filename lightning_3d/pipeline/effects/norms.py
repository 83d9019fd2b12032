"""Running statistics of norms: one update by the whole batch in place of one by each microbatch.

In a step a norm works on copies of its running statistics, with a momentum of 1, so that they are then what the call
saw: the mean and the unbiased variance of a channel. At the end the norm is updated once for each call that one process
makes of it; forwards that run again in a backward do not count. Normalisation itself is by microbatch.

Of microbatches with n_i values of a channel, means m_i and variances v_i, a batch of N values has

    m = sum(n_i m_i) / N
    v = (sum((n_i - 1) v_i) + sum(n_i (m_i - m)^2)) / (N - 1)

Instance norms take the mean over samples of their means and variances instead. The idea is torchgpipe's deferred batch
normalization (https://arxiv.org/abs/2004.09910).

A norm in a block of one rank is updated there. One in glue, or in a block that several ranks hold, is on all of them,
and its calls are made on some stages: each stage reports those that it made.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import override

from lightning_3d.model.block_runner import AnyCallable
from lightning_3d.model.norm_forward import NormForward
from lightning_3d.pipeline.effects.effect import Effect, StepContext
from lightning_3d.pipeline.stage_run import StageExit
from lightning_3d.torch_internals.modules import BatchNorm, RunningNorm, buffers_of
from lightning_3d.torch_internals.patches import replaced
from lightning_3d.torch_internals.pytree import tree_leaves
from lightning_3d.torch_internals.tensors import widened
from lightning_3d.trace.ghost import Ghost
from lightning_3d.trace.interception import Router

_MEAN, _VAR, _TRACKED = "running_mean", "running_var", "num_batches_tracked"

_Position = tuple[int, int]
"""Orders the calls of a norm in a step: stage, and number of the call in it; 0 and the number in the step, in glue."""


@dataclass(frozen=True)
class _Seen:
    """The statistics that a call saw."""

    mean: Tensor
    var: Tensor
    count: int
    """Values of a channel, or samples of an instance norm."""


class Norms(Effect):
    """The norms of a model that keep running statistics.

    Args:
        shared_blocks: FQNs of blocks that several ranks hold.
    """

    def __init__(self, module: nn.Module, router: Router, shared_blocks: Collection[str] = ()) -> None:
        self._norms = {fqn: norm for fqn, norm in module.named_modules() if isinstance(norm, RunningNorm)}
        self._forwards = [NormForward(norm, partial(self._call, fqn)) for fqn, norm in self._norms.items()]
        owners = {inner: fqn for fqn, block in router.blocks.items() for inner in block.modules()}
        self._glue = frozenset(fqn for fqn, norm in self._norms.items() if norm not in owners)
        self._shared = [f for f, norm in self._norms.items() if f in self._glue or owners[norm] in shared_blocks]
        self._patches = ExitStack()
        self._calls: dict[tuple[int, int], dict[str, list[_Seen | None]]] = {}  # stage, microbatch -> FQN -> its calls
        self._present: dict[str, list[_Seen | None]] | None = None  # of the microbatch whose forward runs
        self._before: dict[str, dict[str, Tensor]] = {}  # FQN -> statistics before the step
        self._found: dict[str, dict[_Position, _Seen]] = {}  # FQN -> its calls on all stages

    @property
    @override
    def is_on_all_stages(self) -> bool:
        return any(_is_updated(self._norms[fqn]) for fqn in self._shared)

    @override
    @contextmanager
    def begin(self, number: int) -> Iterator[None]:
        self._calls, self._before, self._found = {}, {}, {}
        with ExitStack() as self._patches:
            yield
        own = self._norms.keys() - self._shared
        for stage, num_microbatches in Counter(stage for stage, _ in self._calls).items():
            self.apply({fqn: self._joined(fqn, stage, num_microbatches) for fqn in own}, is_own=True)

    @override
    @contextmanager
    def microbatch(self, context: StepContext) -> Iterator[None]:
        if context.is_trace:  # all state is put back after it
            yield
            return
        if not self._calls:
            for forward in self._forwards:
                self._patches.enter_context(forward.installed())
        self._present = self._calls[context.stage, context.microbatch] = defaultdict(list)
        try:
            yield
        finally:
            self._present = None

    def _call(self, fqn: str, own: AnyCallable, args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
        """Run a norm's forward on copies of its statistics."""
        norm = self._norms[fqn]
        if not _is_updated(norm):
            return own(*args, **kwargs)
        calls = [] if self._present is None else self._present[fqn]
        given = next(iter((*args, *kwargs.values())))
        count = given.numel() // given.shape[1] if isinstance(norm, BatchNorm) else len(given)
        buffers: dict[str, Any] = buffers_of(norm)
        before = _statistics(norm)
        buffers.update({name: buffer.clone() for name, buffer in before.items()})
        try:
            with replaced("momentum", norm, {"momentum": 1.0}):
                output = own(*args, **kwargs)
            ran = not any(isinstance(leaf, Ghost) for leaf in tree_leaves(output))
            calls.append(_Seen(buffers[_MEAN], buffers[_VAR], count) if ran else None)
        except StageExit:  # the stage needs nothing after it
            calls.append(_Seen(buffers[_MEAN], buffers[_VAR], count))
            raise
        finally:
            buffers.update(before)
        return output

    @override
    def join(self, stage: int, found: Sequence[object], sizes: Sequence[int]) -> dict[str, dict[_Position, _Seen]]:
        return {fqn: self._joined(fqn, stage, len(sizes)) for fqn in self._shared}

    def _joined(self, fqn: str, stage: int, num_microbatches: int) -> dict[_Position, _Seen]:
        """The statistics that each call of a norm that a stage made would have seen of the whole batch."""
        of_microbatches = [self._calls[stage, index].get(fqn, ()) for index in range(num_microbatches)]
        columns = enumerate(zip_longest(*of_microbatches))
        made = [(i, [call for call in column if call is not None]) for i, column in columns]
        start = 0 if fqn in self._glue else stage
        return {(start, i): _of_batch(self._norms[fqn], calls) for i, calls in made if calls}

    @override
    def apply(self, merged: Mapping[str, Mapping[_Position, _Seen]], *, is_own: bool) -> None:
        for fqn, of_stage in merged.items():
            norm = self._norms[fqn]
            if not of_stage or norm.running_mean is None or norm.running_mean.is_meta:
                continue
            now = _statistics(norm)
            before = self._before.setdefault(fqn, {name: buffer.clone() for name, buffer in now.items()})
            found = self._found.setdefault(fqn, {})
            found.update(of_stage)  # a later stage knows more of the same call
            for name, value in _updated(norm, before, [found[position] for position in sorted(found)]).items():
                now[name].copy_(value)


def _is_updated(norm: RunningNorm) -> bool:
    """Whether a call now would update running statistics."""
    if norm.running_mean is None:
        return False
    if isinstance(norm, BatchNorm):
        return norm.training and norm.track_running_stats
    return norm.training or not norm.track_running_stats


def _statistics(norm: RunningNorm) -> dict[str, Tensor]:
    buffers = buffers_of(norm)
    return {name: buffer for name in (_MEAN, _VAR, _TRACKED) if (buffer := buffers.get(name)) is not None}


def _of_batch(norm: RunningNorm, calls: Sequence[_Seen]) -> _Seen:
    """The statistics that one call on the whole batch would have seen, in place of one on every microbatch."""
    means = widened(torch.stack([call.mean for call in calls]))
    variances = widened(torch.stack([call.var for call in calls]))
    counts = torch.tensor([[call.count] for call in calls], dtype=means.dtype, device=means.device)
    total = sum(call.count for call in calls)
    mean = (counts * means).sum(0) / total
    if isinstance(norm, BatchNorm):
        squares = (counts - 1) * variances + counts * (means - mean).square()
        return _Seen(mean, squares.sum(0) / (total - 1), total)
    return _Seen(mean, (counts * variances).sum(0) / total, total)


def _updated(norm: RunningNorm, before: Mapping[str, Tensor], calls: Sequence[_Seen]) -> dict[str, Tensor]:
    """The running statistics after these calls, in order."""
    now = {name: widened(buffer) for name, buffer in before.items()}
    for call in calls:
        momentum = norm.momentum
        if isinstance(norm, BatchNorm) and _TRACKED in now:
            now[_TRACKED] = now[_TRACKED] + 1
            momentum = 1 / float(now[_TRACKED]) if momentum is None else momentum
        for name, value in ((_MEAN, call.mean), (_VAR, call.var)):
            now[name] = now[name].lerp(value.to(now[name].device), momentum or 0.0)
    return now
