"""The communication of a sharded block, told by a record of its calls, without running them again for each try.

The search of a plan tries tens of ways to shard a block (`search`). All make the same calls in the same order, as a
block's code sees tensors of full shape whatever is sharded; they differ in what is sharded. So the block runs once, on
fake tensors and unsharded, and its calls are written down (`record`). A replay asks the same rules about the same calls
as a run would (`simulate`), and takes the results' shapes from the record. A call that no sharded tensor comes to costs
it next to nothing, and the others are answered once for all replays in which their operands lie alike.
What it says decides only which way is taken: that one is then run.

The history of a tensor, as autograd has it, is here a number with a bit for every collective of the backward that its
gradient meets.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from functools import partial
from itertools import repeat
from typing import Any

import torch
from torch import Tensor

from lightning_3d.sharding.axis import Kind
from lightning_3d.sharding.collectives import bytes_sent, kind_of, placement_of_gradient
from lightning_3d.sharding.placement import (
    REPLICATE,
    REPLICATE_PARTIAL_GRAD,
    InterleavedShard,
    Placement,
    Shard,
    Sharded,
)
from lightning_3d.sharding.rules.call import PARTIAL, InputPlacement, LocalCall, RunningStatistic, TorchCall
from lightning_3d.sharding.rules.function import map_tensors, tensors_in
from lightning_3d.sharding.rules.views import SEPARATE
from lightning_3d.sharding.sharded_tensor import ShardedTensor, placement_of, shard_dim
from lightning_3d.tensor.interpreter import TensorInterpreter
from lightning_3d.tensor.plan.planned_axis import PlannedAxis, PlannedCollective
from lightning_3d.tensor.plan.record import Answer, Record, RecordedCall
from lightning_3d.tensor.plan.simulate import Choice, Simulated, Simulation, Terms
from lightning_3d.tensor.plan.weights import Weights, sources_of
from lightning_3d.tensor.sequence import cut_sequence, is_along
from lightning_3d.torch_internals.tensors import make_wrapper


def replay(record: Record, *, choice: Choice, terms: Terms) -> Simulated:
    """Give the answer of `simulate_block`, as far as a record tells.

    Raises:
        ChangedInPlace: as for `simulate_block`.
    """
    axis = PlannedAxis(terms.size)
    shard = partial(stand_in, axis, is_weight=True)
    weights = Weights(record.parameters, choice.replicated, terms.by_hand, choice.part_sizes, axis, shard)
    with torch.enable_grad():
        sequence = cut_sequence(record.args, PlannedAxis(terms.size))[1] if terms.sequence_parallel else None
        played = _Replay(weights, axis, sequence)
        if sequence is not None:
            played.cut_first(record)
        with axis.caused_by(call="running statistics"), played.statistics:
            played.make_calls(record)
        with axis.caused_by(call="buffers that it sets"):
            played.make_whole(record.buffers)
        sharded = {i for i, leaf in enumerate(record.outputs) if shard_dim(played.now(leaf)) is not None}
        unused_outputs = terms.unused_outputs & sharded
        with axis.caused_by(call="the block's output"):
            backward = played.make_whole(leaf for i, leaf in enumerate(record.outputs) if i not in unused_outputs)
    return played.simulated(choice, backward, unused_outputs, read_data=record.read_data)


def stand_in(axis: PlannedAxis, full: Tensor, placement: Sharded, *, is_weight: bool) -> ShardedTensor:
    """A sharded tensor without a local part."""
    made: ShardedTensor = make_wrapper(
        ShardedTensor, full.shape, dtype=full.dtype, device=full.device, requires_grad=full.requires_grad
    )
    made.axis, made.placement, made.is_weight = axis, placement, is_weight
    return made


class _OnRecord(TensorInterpreter):
    """Takes results from a record, in place of computing them.

    A plain tensor is the recorded one. A sharded tensor has a shape and no local part.
    """

    axis: PlannedAxis

    def __init__(self, axis: PlannedAxis, sequence: torch.Size | None) -> None:
        super().__init__(axis, sequence)
        self.sharded: dict[int, ShardedTensor] = {}
        """Recorded tensor by id -> the sharded one in its place."""
        self._expected: list[PlannedCollective] = []
        """The collectives of the backward; a bit of every history."""
        self._histories: dict[int, int] = {}
        self._entered_histories: dict[int, int] = {}  # plain tensor by id -> the history of what all calls read of it
        self._kept: list[Tensor] = []  # so that no id is used twice
        self._recorded: RecordedCall
        """The call that is made now."""
        self._came = 0
        """The history of its operands."""
        self._needs: list[tuple[Tensor, InputPlacement]] = []
        """Its operands, and what each has to be."""
        self._sums: list[PlannedCollective] = []
        """The sums that it made."""
        self._is_repeatable = True
        """Whether nothing but how its operands lie decides its answer."""

    def now(self, tensor: object) -> Any:
        """The tensor in place of a recorded one."""
        return self.sharded.get(id(tensor), tensor)

    def make_whole(self, leaves: Iterable[object]) -> Sequence[PlannedCollective]:
        """Gather recorded tensors that are sharded; the collectives of the backward of all of them."""
        distinct = {id(leaf): leaf for leaf in leaves if isinstance(leaf, Tensor)}
        met = 0
        for tensor in distinct.values():
            met |= self.history(self.whole(self.now(tensor)))
        return [caused for i, caused in enumerate(self._expected) if met >> i & 1]

    # ------------------------------------------------------------------------------------------------- histories

    def history(self, tensor: Tensor) -> int:
        """A bit for every collective that the gradient of a tensor meets."""
        return self._histories.get(id(tensor), 0)

    def history_of(self, call: TorchCall) -> int:
        """A bit for every collective that the gradients of a call's operands meet."""
        met = 0
        for tensor in call.tensors:
            met |= self.history(tensor)
        return met

    def expect(self, kind: Kind, num_bytes: int) -> int:
        """Another collective of the backward, in which a rank sends so many bytes."""
        self._expected.append(self.axis.caused(kind, num_bytes, is_backward=True))
        return 1 << len(self._expected) - 1

    def follow(self, recorded: RecordedCall, came: int) -> None:
        """Give the results of a call, and what it changed, the history of its operands."""
        for tensor in (*recorded.results, *recorded.written):
            made = self.now(tensor)
            if recorded.written and any(tensor is other for other in recorded.written):
                self._entered_histories.pop(id(tensor), None)
                came |= self.history(made)
            if came and recorded.has_gradient and made.requires_grad:
                self._histories[id(made)] = came
            else:
                self._histories.pop(id(made), None)

    # ---------------------------------------------------------------------- in place of what an interpreter does

    def run_plain(self, call: TorchCall) -> Any:
        if call.function != self._recorded.call.function:  # a further call on a result, as for a bias
            return super().run_plain(call)
        self._came, self._is_repeatable = self.history_of(call), False
        return self._recorded.output

    def execute(self, call: TorchCall, local: LocalCall) -> Any:
        # What a weight gives is noted at every use.
        self._is_repeatable &= local.epilogue is None and local.weight is None and not local.makes_weight
        self._needs = list(zip(local.tensors, local.input_placements, strict=True))
        self._came, self._sums = self._met(self._needs), []
        placements = iter(local.result) if isinstance(local.result, tuple) else repeat(local.result)
        offsets = iter(local.offsets)
        output = self._recorded.output
        if local.epilogue is not None and isinstance(local.result, Shard | InterleavedShard):
            output = self._before_second_view(local, local.result)
        made = map_tensors(lambda full: self.wrap(full, next(placements), local, next(offsets, 0)), output)
        if local.epilogue is None or not isinstance(made, ShardedTensor):
            return made
        self._histories[id(made)] = self._came
        with self:
            return local.epilogue(made)

    def _before_second_view(self, local: LocalCall, placement: Sharded) -> Tensor:
        """A full tensor like the result of the first of two views, of which the record has the second one's."""
        (tensor,), (result,) = local.tensors, self._recorded.results
        at = placement_of(tensor)
        assert at is not None
        own = local.run(at.own(torch.empty(tensor.shape, device="meta"), self.axis.size, 0))
        shape = [length * self.axis.size if dim == placement.dim else length for dim, length in enumerate(own.shape)]
        return result.new_empty(shape).requires_grad_(result.requires_grad)

    def moved(self, tensor: ShardedTensor, target: Placement) -> Tensor:
        """The same tensor, whose way is noted."""
        kind = kind_of(tensor.placement, target)
        assert kind is not None
        self.axis.forward.append(self.axis.caused(kind, self._bytes_sent(tensor, tensor.placement, target)))
        return tensor

    def shard(self, own: Tensor, placement: Sharded, *, is_weight: bool) -> Tensor:
        """A sharded tensor in place of a recorded one."""
        made = stand_in(self.axis, own, placement, is_weight=is_weight)
        self._kept.append(made)
        return made

    def sum(self, summand: Tensor, local: LocalCall) -> Tensor:
        if local.weight is None or not is_along(summand, self.sequence):
            self._sums.append(self.axis.caused("all-reduce", self._bytes_sent(summand, PARTIAL, REPLICATE)))
            self.axis.forward.append(self._sums[-1])
            return summand
        self._is_repeatable, along = False, self.along_sequence
        self.axis.forward.append(self.axis.caused("reduce-scatter", self._bytes_sent(summand, PARTIAL, along)))
        if summand.requires_grad:
            self._came |= self.expect("all-gather", self._bytes_sent(summand, along, REPLICATE))
        return self.shard(summand, along, is_weight=False)

    def _met(self, input_placements: Iterable[tuple[Tensor, InputPlacement]]) -> int:
        """The history of operands that are made what a call needs."""
        met = 0
        for tensor, input_placement in input_placements:
            met |= self._redistributed(tensor, input_placement)
        return met

    def _redistributed(self, tensor: Tensor, input_placement: InputPlacement) -> int:
        history = self.history(tensor)
        if isinstance(input_placement, RunningStatistic):
            self._is_repeatable = False
            self.statistics.own(tensor, changes=input_placement.changes)
            return history
        source, target = placement_of(tensor) or REPLICATE, input_placement
        if source == target:
            return history
        has_gradient = tensor.requires_grad and self._recorded.has_gradient
        if target == REPLICATE_PARTIAL_GRAD:
            return self._met_by_each(tensor, history) if has_gradient or isinstance(tensor, ShardedTensor) else history
        if isinstance(tensor, ShardedTensor):
            self.moved(tensor, target)
        return history | self._expected_back(tensor, source, target) if has_gradient else history

    def _met_by_each(self, tensor: Tensor, history: int) -> int:
        """The history of what every rank reads; one for all calls that read it."""
        source, each = placement_of(tensor) or REPLICATE, REPLICATE_PARTIAL_GRAD
        is_slice = isinstance(tensor, ShardedTensor) and self.is_slice_of_sequence(tensor)
        if isinstance(tensor, ShardedTensor) and not is_slice:
            self.moved(tensor, each)
            return history | self._expected_back(tensor, source, each) if tensor.requires_grad else history
        if id(tensor) not in self._entered_histories:
            if isinstance(tensor, ShardedTensor):
                self.moved(tensor, each)
            if tensor.requires_grad:
                history |= self._expected_back(tensor, source, each)
            if tensor.requires_grad and is_slice:
                history |= self.expect("all-gather", self._bytes_sent(tensor, source, REPLICATE))
            self._entered_histories[id(tensor)] = history
        return self._entered_histories[id(tensor)]

    def _expected_back(self, tensor: Tensor, source: Placement, target: Placement) -> int:
        """The way of a gradient, if a collective is on it."""
        way = placement_of_gradient(target), placement_of_gradient(source)
        if (kind := kind_of(*way)) is None:
            return 0
        with self.axis.caused_by(sources=sources_of(tensor)) if isinstance(tensor, ShardedTensor) else nullcontext():
            return self.expect(kind, self._bytes_sent(tensor, *way))

    def _bytes_sent(self, tensor: Tensor, source: Placement, target: Placement) -> int:
        return bytes_sent(tensor.shape, tensor.itemsize, source, target, self.axis.size)


class _Replay(Simulation, _OnRecord):
    """Decides weights as a simulation does."""

    def cut_first(self, record: Record) -> None:
        """Cut the block's input along its sequence."""
        first = record.args[0]
        made = self.sharded[id(first)] = stand_in(self.axis, first, self.along_sequence, is_weight=False)
        if first.requires_grad:
            self._histories[id(made)] = self._expected_back(first, REPLICATE, self.along_sequence)

    def make_calls(self, record: Record) -> None:
        """Make all calls of a record, but for those that neither a sharded tensor nor a history comes to."""
        sharded, histories = self.sharded.keys(), self._histories.keys()
        for recorded in record.calls:
            self._recorded = recorded
            if self.weights.are_in(recorded.call):
                self._take(recorded, tensors_in(self._answered(recorded, recorded.call.mapped(self.now))))
            elif not sharded.isdisjoint(recorded.operands):
                self._take(recorded, self._on_shards(recorded))
            elif recorded.written or not histories.isdisjoint(recorded.operands):
                self.run_plain(recorded.call)
            else:
                continue
            if self._came or recorded.written:
                self.follow(recorded, self._came)

    def _take(self, recorded: RecordedCall, results: Sequence[Tensor]) -> None:
        """Put the sharded tensors among the results in the places of the recorded ones."""
        for full, made in zip(recorded.results, results, strict=True):
            self.sharded.pop(id(full), None)
            if isinstance(made, ShardedTensor):
                self.sharded[id(full)] = made

    def _on_shards(self, recorded: RecordedCall) -> Sequence[Tensor]:
        """The results of a call without weights to decide; those of before if its operands lie as they did."""
        operands = [self.now(tensor) for tensor in recorded.call.tensors]
        lie = tuple([_lies(operand) for operand in operands])
        if (known := recorded.answers.get(lie)) is not None:
            return self._repeated(recorded.call, operands, known)
        self._is_repeatable = not any(isinstance(operand, ShardedTensor) and operand.is_weight for operand in operands)
        results = tensors_in(self._answered(recorded, recorded.call.mapped(self.now)))
        at = {id(operand): i for i, operand in enumerate(operands)}
        if self._is_repeatable and all(id(tensor) in at for tensor, _ in self._needs):
            input_placements = [(at[id(tensor)], input_placement) for tensor, input_placement in self._needs]
            moved = [
                (i, input_placement)
                for i, input_placement in input_placements
                if input_placement != (placement_of(operands[i]) or REPLICATE)
            ]
            as_they_lie = [i for i, input_placement in input_placements if (i, input_placement) not in moved]
            recorded.answers[lie] = Answer(results=results, as_they_lie=as_they_lie, moved=moved, sums=self._sums)
        return results

    def _repeated(self, call: TorchCall, operands: Sequence[Tensor], known: Answer) -> Sequence[Tensor]:
        if call.name in SEPARATE:
            self._note_cuts(call, self.now(call.first))
        self._came = 0
        for i in known.as_they_lie:
            self._came |= self.history(operands[i])
        if known.moved:
            with self.axis.caused_by(call=call.name):
                self._came |= self._met((operands[i], input_placement) for i, input_placement in known.moved)
        self.axis.forward.extend(known.sums)
        return known.results

    def _answered(self, recorded: RecordedCall, call: TorchCall) -> Any:
        if recorded.cls is None:
            return self.dispatch(call)
        return self.on_custom_function(
            recorded.cls, lambda *args, **kwargs: self.run_plain(call), call.args, call.kwargs
        )


def _lies(tensor: Tensor) -> object:
    """A key of an operand: an answer holds for those that have it alike."""
    return (tensor.placement, tensor.source_weights, tensor.is_weight) if isinstance(tensor, ShardedTensor) else None
