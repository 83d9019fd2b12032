"""Norms that keep running statistics: one update by the whole batch in place of one by each microbatch.

In a step every call of a norm works on copies of its running statistics, which go from call to call of a microbatch.
What the calls saw is joined over the microbatches at the end, and the norm is updated once for each call that one
process makes of it. So the statistics are those of before the step until its end, in recomputed forwards, too, and
steps of which nothing is applied leave them alone. Normalisation itself is by microbatch.

A norm in a block of one rank is updated there. One in glue, or in a block that several ranks hold, is on all of them,
and its calls are made on some stages: each stage reports those that it made.
"""

from __future__ import annotations

from collections import ChainMap, Counter, defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import override

from lightning_3d.activations.recomputation import is_recomputing
from lightning_3d.model.block_runner import Call
from lightning_3d.model.norm_forward import NormForward
from lightning_3d.pipeline.effects.effect import Effect, Place
from lightning_3d.pipeline.effects.running_statistics import (
    NormCall,
    Seen,
    State,
    copied,
    on_copies,
    seen,
    state_of,
    updated,
    updates_statistics,
)
from lightning_3d.pipeline.stage_run import StageExit
from lightning_3d.torch_internals.autograd import StopRecomputation
from lightning_3d.torch_internals.modules import BatchNorm, RunningNorm
from lightning_3d.torch_internals.pytree import tree_leaves
from lightning_3d.trace.ghost import Ghost
from lightning_3d.trace.interception import Router, StepMode

_Position = tuple[int, int]
"""Orders the calls of a norm in a step: stage, and number of the call in it; 0 and the number in the step, in glue."""


class Norms(Effect):
    """The norms of a model that keep running statistics.

    Args:
        shared_blocks: FQNs of blocks that several ranks hold.
    """

    def __init__(self, module: nn.Module, router: Router, shared_blocks: Collection[str] = ()) -> None:
        self._router = router
        self._norms = {fqn: norm for fqn, norm in module.named_modules() if isinstance(norm, RunningNorm)}
        self._forwards = [NormForward(norm, partial(self._call, fqn)) for fqn, norm in self._norms.items()]
        owners = {inner: fqn for fqn, block in router.blocks.items() for inner in block.modules()}
        self._glue = frozenset(fqn for fqn, norm in self._norms.items() if norm not in owners)
        self._shared = [f for f, norm in self._norms.items() if f in self._glue or owners[norm] in shared_blocks]
        self._patches = ExitStack()
        self._calls: dict[tuple[int, int], dict[str, list[NormCall]]] = {}  # stage, microbatch -> FQN -> its calls
        self._recomputed: set[tuple[int, int]] = set()
        self._present: dict[str, list[NormCall]] | None = None  # of what runs now
        self._before: dict[str, State] = {}  # of shared norms
        self._found: dict[str, dict[_Position, Seen]] = {}  # of shared norms, by all stages

    @property
    @override
    def is_on_all_stages(self) -> bool:
        return any(updates_statistics(self._norms[fqn]) for fqn in self._shared)

    @override
    @contextmanager
    def begin(self, number: int) -> Iterator[None]:
        self._calls, self._recomputed, self._found = {}, set(), {}
        self._before = {fqn: copied(state_of(self._norms[fqn])) for fqn in self._shared}
        with ExitStack() as self._patches:
            yield
        for fqn in self._norms.keys() - self._shared:
            of_stages = [self._seen(fqn, stage, number) for stage, number in Counter(s for s, _ in self._calls).items()]
            self._update(fqn, state_of(self._norms[fqn]), ChainMap(*of_stages))

    @override
    @contextmanager
    def microbatch(self, place: Place) -> Iterator[None]:
        if place.is_trace:  # all state is put back after it
            yield
            return
        if not self._calls:
            for forward in self._forwards:
                self._patches.enter_context(forward.installed())
        self._present = self._calls[place.stage, place.microbatch] = defaultdict(list)
        try:
            yield
        finally:
            self._present = None

    @override
    @contextmanager
    def backward(self, stage: int, microbatch: int) -> Iterator[None]:
        key = stage, microbatch
        if key not in self._recomputed:  # a backward in two pieces may run it twice
            self._present = self._calls[key]
        num_calls = _num_calls(self._calls[key])
        try:
            yield
        finally:
            self._present = None
            if _num_calls(self._calls[key]) > num_calls:
                self._recomputed.add(key)

    def _call(self, fqn: str, own: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a norm's forward on copies of its statistics."""
        norm, step = self._norms[fqn], self._router.step
        if not updates_statistics(norm):
            return own(*args, **kwargs)
        calls = [] if self._present is None or is_recomputing() else self._present[fqn]
        before = calls[-1].after if calls else state_of(norm)
        # A checkpoint around glue recomputes it in one process, where it then counts twice.
        times = 2 if isinstance(step, StepMode) and step.is_checkpointing and torch.is_grad_enabled() else 1
        count = _count(norm, next(iter((*args, *kwargs.values()))))
        with on_copies(norm, before) as after:
            call = NormCall(before=before, after=after, count=count, times=times, ran=True)
            try:
                output = own(*args, **kwargs)
            except (StageExit, StopRecomputation):  # nothing was needed after it
                calls.append(call)
                raise
        calls.append(replace(call, ran=not any(isinstance(leaf, Ghost) for leaf in tree_leaves(output))))
        return output

    @override
    def join(self, stage: int, sizes: Sequence[int], *, is_last: bool) -> dict[str, dict[_Position, Seen]]:
        return {fqn: self._seen(fqn, stage, len(sizes)) for fqn in self._shared}

    def _seen(self, fqn: str, stage: int, num_microbatches: int) -> dict[_Position, Seen]:
        """For each call of a norm that a stage made: mean and variance of the whole batch."""
        of_microbatches = [self._calls[stage, index].get(fqn, ()) for index in range(num_microbatches)]
        columns = enumerate(zip_longest(*of_microbatches))
        made = [(i, [call for call in column if call is not None and call.ran]) for i, column in columns]
        start = 0 if fqn in self._glue else stage
        return {(start, i): seen(self._norms[fqn], calls) for i, calls in made if calls}

    @override
    def apply(self, joined: Mapping[str, Mapping[_Position, Seen]], *, is_own: bool) -> None:
        for fqn, found in joined.items():
            self._found.setdefault(fqn, {}).update(found)  # a later stage knows more of the same call
            self._update(fqn, self._before[fqn], self._found[fqn])

    def _update(self, fqn: str, before: State, found: Mapping[_Position, Seen]) -> None:
        norm = self._norms[fqn]
        if found and not any(buffer.is_meta for buffer in before.values()):
            now = updated(norm, before, [found[position] for position in sorted(found)])
            for name, buffer in state_of(norm).items():
                buffer.copy_(now[name])


def _num_calls(calls: Mapping[str, Sequence[NormCall]]) -> int:
    return sum(map(len, calls.values()))


def _count(norm: RunningNorm, given: Tensor) -> int:
    """Values of a channel; of an instance norm, samples."""
    return given.numel() // given.shape[1] if isinstance(norm, BatchNorm) else len(given)
