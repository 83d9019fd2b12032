"""Calls of a module's steps, and their traces, kept by kind of call."""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import TypeVar

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities import rank_zero_warn
from torch import nn

from lightning_3d.pipeline.microbatches import contents, copied_batch, num_samples, signature
from lightning_3d.trace.step_tracing import StepTracing
from lightning_3d.trace.trace import Trace
from lightning_3d.trace.traced_numbers import OF_TRAINER, Decisions
from lightning_3d.trace.world_collectives import world_collectives_refused

T = TypeVar("T")
_MAX_CACHED = 64


@dataclass(frozen=True, kw_only=True)
class StepCall:
    """A call of a step of the user's module, on a batch or a part of it."""

    name: str
    """``"training_step"``, ``"validation_step"``, ..."""
    batch: object
    rest: Sequence[object]
    """Its further arguments."""
    state: Hashable
    """All that its trace depends on besides the batch."""
    heads: frozenset[str] = frozenset()
    """FQNs of blocks that belong to the code after the blocks, where that runs apart."""
    changing: Set[Hashable] = field(default=frozenset(), repr=False)
    """Kinds of calls that change their batch."""

    @cached_property
    def kind(self) -> Hashable:
        """All that its trace depends on."""
        return self.name, self.state, signature(self.batch)

    @property
    def size(self) -> int:
        """Samples in the batch."""
        return num_samples(self.batch)

    def run(self, module: nn.Module) -> object:
        """Call it; the batch stays as it is, for other stages, the code after the blocks, and a step that fails."""
        batch = copied_batch(self.batch) if self.kind in self.changing else self.batch
        return getattr(module, self.name)(batch, *self.rest)


class Traces:
    """Traces steps, each kind once.

    A kind is all that a trace depends on: the shapes of the batch, flags of modules outside of blocks, and how those
    decisions come out that the step made by ``batch_idx``, ``current_epoch`` and ``global_step`` in earlier traces.

    Args:
        blocks: Of the module.
        heads: FQNs of those that make logits on the last stage. An evaluation whose code after the blocks runs on the
            whole batch gets what they read, not all logits, which a loss may never make.
        gathered: Gives the number of each rank that traces the same steps, so that kinds are new to all at once; it
            stands for all that a trace depends on besides the batch, and is compared in its own process alone.
    """

    def __init__(
        self,
        module: LightningModule,
        blocks: Iterable[nn.Module],
        tracing: StepTracing,
        gathered: Callable[[int], Sequence[int]] = lambda number: (number,),
        heads: frozenset[str] = frozenset(),
    ) -> None:
        self._module, self._blocks, self._tracing, self._gathered = module, frozenset(blocks), tracing, gathered
        self._heads = heads
        self._known: OrderedDict[Hashable, Trace] = OrderedDict()
        self._changing: set[Hashable] = set()
        self._num_traced: Counter[str] = Counter()  # by name of the step, as those below
        self._decisions: defaultdict[str, Decisions] = defaultdict(Decisions)

    def calls(self, name: str, batches: Sequence[object], rest: Sequence[object]) -> list[StepCall]:
        """The calls ``module.<name>(batch, *rest)``, as the module is now."""
        # What is frozen may change while training.
        trainable = bytes(parameter.requires_grad for parameter in self._module.parameters())
        decided = self._decisions[name].outcomes(self._numbers(rest))
        flags = tuple(self._flags(self._module))
        state = tuple(self._gathered(hash((torch.is_grad_enabled(), trainable, flags, decided))))
        heads = frozenset[str]() if name == "training_step" else self._heads
        make = partial(StepCall, name=name, rest=rest, state=state, heads=heads, changing=self._changing)
        return [make(batch=batch) for batch in batches]

    def trace(self, call: StepCall) -> Trace:
        """The trace of such a call."""
        return cached(self._known, call.kind, lambda: self._traced(call))

    def _traced(self, call: StepCall) -> Trace:
        self._num_traced[call.name] += 1
        if self._num_traced[call.name] == _MAX_CACHED:
            rank_zero_warn(
                f"{call.name} was traced for {_MAX_CACHED} kinds of batches, and each further one takes a moment, too."
                " Let batches have few shapes, and lists of numbers in them, such as ids, be tensors."
            )
        with world_collectives_refused(), self.deciding(call) as deciding:
            batch = copied_batch(call.batch)
            before = contents(batch)
            trace = self._tracing(call.name, batch, deciding.rest)
        if contents(batch) != before:
            self._changing.add(call.kind)
        return trace

    @contextmanager
    def deciding(self, call: StepCall, *, notes_values: bool = True) -> Iterator[StepCall]:
        """The call to make inside, whose decisions by numbers are noted: where one comes out otherwise, a call is of
        another kind.

        Args:
            notes_values: As of ``Decisions.noted``.
        """
        with self._decisions[call.name].noted(self._numbers(call.rest), notes_values=notes_values) as numbers:
            rest = [numbers.get(_argument(i), value) for i, value in enumerate(call.rest)]
            yield replace(call, rest=rest)

    def _numbers(self, rest: Sequence[object]) -> dict[str, int]:
        """The integers by which a step may decide."""
        arguments = {_argument(i): value for i, value in enumerate(rest) if type(value) is int}
        return {name: getattr(self._module, name) for name in OF_TRAINER} | arguments

    def _flags(self, module: nn.Module) -> Iterator[tuple[str, bool | str]]:
        """Attributes outside of blocks by which a step may decide."""
        yield from ((name, value) for name, value in vars(module).items() if type(value) in (bool, str))
        for child in module.children():
            if child not in self._blocks:
                yield from self._flags(child)


def _argument(i: int) -> str:
    return f"argument {i}"


def cached(cache: OrderedDict[Hashable, T], key: Hashable, make: Callable[[], T], *, most: int = _MAX_CACHED) -> T:
    """The value for this key, made if it is not among the `most` that were used last."""
    if key not in cache:
        while len(cache) >= most:
            cache.popitem(last=False)
        cache[key] = make()
    cache.move_to_end(key)
    return cache[key]
