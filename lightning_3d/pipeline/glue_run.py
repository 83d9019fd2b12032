"""The code before and between the blocks, on microbatches and on the whole batch: each sample has to come to the blocks
the same, or it meets others there, which a microbatch lacks.

    x.flip(0), x.roll(1, 0), x[torch.randperm(len(x))], x - x.mean(0)

All of that code runs for real. Blocks answer with random numbers, for the whole batch with those for its parts, and so
do parameters that this rank lacks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from lightning_3d.errors import StepError
from lightning_3d.model.block_runner import AnyCallable
from lightning_3d.pipeline.microbatch_concat import MicrobatchConcat, grown_dim
from lightning_3d.pipeline.row_order import views_of
from lightning_3d.pipeline.stage_run import Draw, StageRun
from lightning_3d.planning.stage_flow import StageFlow
from lightning_3d.torch_internals.pytree import tree_leaves, tree_unflatten
from lightning_3d.torch_internals.tensors import version_of
from lightning_3d.trace.fake_blocks import RandomnessSeen
from lightning_3d.trace.ghost import TensorMeta
from lightning_3d.trace.interception import Router
from lightning_3d.trace.trace import Result, Trace, TracedCall


class CoupledError(StepError):
    """Samples meet each other before or between the blocks."""


class GlueRun(StageRun):
    """Runs the code before the tail on a part of a batch.

    Args:
        index: Number of the part.
        whole: The trace of the whole batch.
    """

    has_replicas = False

    def __init__(self, router: Router, flow: StageFlow, draw: Draw, whole: Trace, index: int) -> None:
        super().__init__(router, flow, 0, (), lambda call: nullcontext(), partial(_data_kept, draw))
        self._whole, self._index = whole, index
        self._copies: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}  # by id and version: the tensor and its copy
        self.given: list[list[object]] = []
        """By call of a block: its flat arguments; None for what other blocks gave."""
        self.of_blocks: set[int] = set()
        """Ids in the trace of what the blocks gave."""
        self.sent: Sequence[Tensor] = ()
        """The tensors that the code after the blocks gets."""

    @override
    def run(self, step: Callable[[], object]) -> Sequence[Tensor]:
        self.sent = super().run(step)
        return self.sent

    @override
    def _check_at_hand(self, values: list[object], call: TracedCall) -> None:
        """Something stands in for what is absent."""

    @override
    def _execute(self, call: TracedCall, leaves: list[object], run: Callable[[list[object]], object]) -> object:
        return super()._execute(call, leaves, partial(self._answered, call, leaves, run))

    def _answered(
        self, call: TracedCall, leaves: list[object], run: Callable[[list[object]], object], values: list[object]
    ) -> object:
        if call.is_block:
            self._take(call, [self._id(leaf) for leaf in leaves], values)
            return tree_unflatten(call.answer(values, self._answer), call.spec)
        values = [self._stand_in(value, position, call) for position, value in enumerate(values)]
        if not call.is_random:
            return run(values)
        kept = undropped(call, self._flow.trace, values)
        return self._draw(run, (values,), {}) if kept is None else kept

    def _id(self, leaf: object) -> int | None:
        return self._ids.get(leaf) if isinstance(leaf, Tensor) else None

    def _take(self, call: TracedCall, ids: Sequence[int | None], values: Sequence[object]) -> None:
        """A block gets these."""
        pairs = zip(ids, values, strict=True)
        self.given.append([None if i in self.of_blocks else self._copy(value) for i, value in pairs])

    def _copy(self, value: object) -> object:
        """One for what several blocks get, as masks are."""
        if not isinstance(value, Tensor):
            return value
        _, copy = self._copies.setdefault((id(value), version_of(value)), (value, value.clone()))
        return copy

    def _answer(self, position: int, result: Result) -> object:
        """A stand-in for an output of a block."""
        if result.tensor is None:
            return result.constant
        self.of_blocks.add(result.tensor)
        return self.answer(result.tensor)

    def answer(self, i: int) -> Tensor:
        """Random numbers in place of the tensor with this id in the trace, which a block gives."""
        meta = self._flow.trace.tensors[i]
        has_samples = grown_dim(meta, self._whole.tensors[i]) is not None
        return _random(meta, i, 1 + self._index if has_samples else 0)

    def _stand_in(self, value: object, position: int, call: TracedCall) -> object:
        if not isinstance(value, Tensor) or not value.is_meta:
            return value
        device = self._flow.trace.tensors[call.outputs[0]].device
        meta = TensorMeta(shape=tuple(value.shape), dtype=value.dtype, device=device, requires_grad=False)
        return self._draw(_random, (meta, position, 0), {})


class WholeGlueRun(GlueRun):
    """Runs it on the whole batch, and compares.

    Args:
        parts: The runs on its parts.
        shares: Their shares of the samples.
        size: Samples in the batch.

    Raises:
        CoupledError: a block, or the code after them, gets other rows for the parts.
    """

    def __init__(
        self, router: Router, flow: StageFlow, draw: Draw, parts: Sequence[GlueRun], shares: Sequence[float], size: int
    ) -> None:
        super().__init__(router, flow, draw, flow.trace, 0)
        self._parts, self._shares, self._size = parts, shares, size
        self._of_answers: dict[int, int] = {}  # by id in the trace: views in what the blocks gave
        self._num_repeats = 1  # in what the present block gets
        self.repeats_per_sample: list[int] = []
        """In what the code after the blocks gets, by tensor."""

    @override
    def run(self, step: Callable[[], object]) -> Sequence[Tensor]:
        sent = super().run(step)
        for i, *tensors in zip(self._flow.sent(0), sent, *(part.sent for part in self._parts), strict=True):
            repeats_per_sample = self._of_answers.get(i) or self._repeats_per_sample(tensors)
            if repeats_per_sample is None:
                raise _coupled("what the code after them gets")
            self.repeats_per_sample.append(repeats_per_sample)
        return sent

    @override
    def _take(self, call: TracedCall, ids: Sequence[int | None], values: Sequence[object]) -> None:
        found = [self._of_answers[i] for i in ids if i in self._of_answers]
        of_parts = [part.given[len(self.given)] for part in self._parts]
        self.given.append([])
        for i, *column in zip(ids, values, *of_parts, strict=True):
            if i not in self._of_answers:
                found.append(self._repeats_per_sample(column) or 0)
        if 0 in found:
            raise _coupled(f"what {call.name} (called at {call.where}) gets")
        self._num_repeats = max(found, default=1)

    def _repeats_per_sample(self, column: Sequence[Any]) -> int | None:
        """The views in something that the whole batch and its parts have; None if samples are coupled in it."""
        whole, *parts = column
        if all(isinstance(value, Tensor) for value in column):  # a mask is none where nothing is masked
            return 1 if whole.is_meta else views_of(whole, parts, self._shares, self._size)
        is_number = type(whole) is float  # integers may be sizes
        return None if is_number and any(part != whole for part in parts) else 1

    @override
    def _answer(self, position: int, result: Result) -> object:
        if result.tensor is None:
            return result.constant
        meta = self._flow.trace.tensors[result.tensor]
        parts = [part.answer(result.tensor) for part in self._parts]
        metas = [TensorMeta.of(part) for part in parts]
        repeats_per_sample, dim = 1, MicrobatchConcat(meta, metas, self._shares).dim
        if dim is not None and meta.shape[dim] // self._size % self._num_repeats == 0:
            repeats_per_sample = self._num_repeats
        self._of_answers[result.tensor] = repeats_per_sample
        return meta.laid_out(MicrobatchConcat(meta, metas, self._shares, repeats_per_sample).join(parts))


def undropped(call: TracedCall, trace: Trace, values: Sequence[object]) -> Tensor | None:
    """The argument of a dropout, which stands for its result, so that it is the same for parts and the whole batch."""
    results = [trace.tensors[i] for i in call.outputs]
    for value in values:
        if isinstance(value, Tensor) and [(value.shape, value.dtype)] == [(r.shape, r.dtype) for r in results]:
            return value
    return None


def _data_kept(draw: Draw, func: AnyCallable, args: tuple[object, ...], kwargs: dict[str, object]) -> object:
    """Make a call on the batch alone. What it draws for data (dropout, ``torch.bernoulli(x)``) the data stand for, as
    random numbers would hide them.
    """
    data = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    if data and "dropout" in getattr(func, "__name__", ""):
        return data[0]
    with RandomnessSeen() as randomness:
        output = draw(func, args, kwargs)
    if not randomness.seen or any(leaf is output for leaf in data):
        return output
    return next((leaf.clone() for leaf in data if _is_like(leaf, output)), output)


def _is_like(tensor: Tensor, other: object) -> bool:
    return isinstance(other, Tensor) and (tensor.shape, tensor.dtype) == (other.shape, other.dtype)


def _random(meta: TensorMeta, *seeds: int) -> Tensor:
    seed = sum(number * 1009**i for i, number in enumerate(seeds))
    return meta.random(torch.Generator(meta.device).manual_seed(seed))


def _coupled(what: str) -> CoupledError:
    return CoupledError(
        "The code before or between the blocks couples samples, as mixup, shuffled batches and statistics of a batch"
        f" do: {what} for the microbatches is not that of the whole batch. Couple samples in the dataset, in the"
        " collate function or after the blocks, or set pipeline.mode=inline."
    )
