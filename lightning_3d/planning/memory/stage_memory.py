"""The memory of one microbatch on one stage, call by call."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from lightning_3d.config.activations import Mode
from lightning_3d.planning.memory.block_memory import BlockMemory
from lightning_3d.planning.stage_flow import StageFlow
from lightning_3d.trace.ghost import TensorMeta
from lightning_3d.trace.storages import CallStorages, StepStorages


@dataclass(frozen=True, kw_only=True)
class CallMemory:
    """Bytes of one call."""

    before: int
    """Alive when its forward begins, of what this stage made or was given."""
    forward: int
    """Above these, at most, in its forward."""
    kept: int
    """Needed by its backward, and kept by nothing before it."""
    backward: int
    """Above what was kept up to it, at most, in its backward."""
    input_backward: int
    """The same where the backward is split."""
    held: int
    """Left for the gradients of the weights by a split backward."""
    weight_backward: int
    """Above what is left, in the gradients of the weights."""
    gradients: int
    """Gradients of weights that no later call of the stage reads, so that its backward is the first to make them."""


@dataclass(frozen=True, kw_only=True)
class StageMemory:
    """Bytes of one microbatch on one stage."""

    calls: tuple[CallMemory, ...]
    until_end: int
    """Kept by none of its calls, but there until its backward ends: what it sends, and tensors of a fused loss."""
    received: int
    """The buffers for what it receives, in the forward and in the backward; torch keeps them from step to step."""
    sent: int
    """Sent to another rank in its forward."""
    sent_back: int
    """Sent to another rank in its backward."""
    casts: int
    """Copies that autocast makes of weights, which all microbatches of a step share."""

    @property
    def kept(self) -> int:
        """Between forward and backward."""
        return self.until_end + sum(call.kept for call in self.calls)


@dataclass(frozen=True, kw_only=True)
class FusedLoss:
    """A head that runs with its loss."""

    head: int
    """Position of its call in the trace."""
    loss: int
    """Position of the loss's; calls between them make views of logits, or logarithms of probabilities."""
    made: frozenset[int]
    """The storages of these, which never exist."""
    logits: int
    """Bytes of what its forward makes of a chunk of rows."""
    rows: int
    """Bytes of the gradient of its rows, which it holds until its backward ends, as it does the rows."""
    weight: int
    """Bytes of the gradient of its weight, which its backward takes."""


@dataclass(frozen=True, kw_only=True)
class MicrobatchMemory:
    """A traced microbatch, and the memory of its calls.

    Args:
        flow: Its trace, cut into stages.
        storages: Of the trace.
        blocks: Position of a block's call -> what it takes.
        modes: Block FQN -> how it is recomputed; those that are missing are not.
        gradients: Block FQN -> bytes of its weights' gradients.
        fused: Heads that run with their losses.
    """

    flow: StageFlow
    storages: StepStorages
    blocks: Mapping[int, BlockMemory]
    modes: Mapping[str, Mode]
    gradients: Mapping[str, int]
    fused: Sequence[FusedLoss] = ()

    def of_stage(self, stage: int, stage_ranks: Sequence[int]) -> StageMemory:
        """Add up one stage.

        Args:
            stage_ranks: For every stage the index of its rank.
        """
        flow = self.flow
        received, sent = flow.received(stage), flow.sent(stage)
        losses = [loss for loss in self.fused if flow.call_stages[loss.loss] == stage]
        rows = frozenset[int]().union(*(self.storages.of_calls[loss.head].inputs for loss in losses))
        calls, kept = self._calls(stage, self._storages_of(received), rows)
        gets = stage > 0 and stage_ranks[stage - 1] != stage_ranks[stage]
        gives = stage + 1 < flow.num_stages and stage_ranks[stage + 1] != stage_ranks[stage]
        leaving = self._storages_of(sent) if gives else frozenset()  # what stays here lies in the next stage's buffers
        until_end = self.storages.num_bytes((leaving | rows) - kept)
        return StageMemory(
            calls=tuple(calls),
            until_end=until_end + sum(loss.rows for loss in losses),
            received=_size(flow.metas(received)) + _size_of_gradients(flow.metas(sent)),
            sent=gives * _size(flow.metas(sent)),
            sent_back=gets * _size_of_gradients(flow.metas(received)),
            casts=self.storages.num_bytes(self._casts(stage)),
        )

    def _casts(self, stage: int) -> Iterator[int]:
        for own, of_call in zip(self.storages.of_calls, self.flow.call_stages, strict=True):
            if of_call == stage:
                yield from own.casts - own.saved

    def _storages_of(self, tensors: Iterable[int]) -> frozenset[int]:
        of_tensors = self.storages.of_tensors
        return frozenset(of_tensors[i] for i in tensors if i in of_tensors)

    def _calls(self, stage: int, received: frozenset[int], rows: frozenset[int]) -> tuple[list[CallMemory], set[int]]:
        """The memory of the stage's calls, and the storages that they keep, with those received.

        Args:
            rows: Kept by fused losses from when they are made until the backward ends.
        """
        positions = [i for i, of_call in enumerate(self.flow.call_stages) if of_call == stage]
        last_reader = {number: i for i in positions for number in self.storages.of_calls[i].inputs}
        last_call = {self.flow.trace.calls[i].name: i for i in positions if self.flow.trace.calls[i].is_block}
        logits = frozenset[int]().union(*(loss.made for loss in self.fused))
        kept, made, memories = set(received), set[int](), list[CallMemory]()
        for i in positions:
            call, own = self.flow.trace.calls[i], self.storages.of_calls[i]
            waiting = {number for number in made if last_reader.get(number, -1) >= i or number in rows} - logits
            before = (kept | waiting) - received
            cost = self._cost(i)
            new = cost.kept - logits - rows - kept
            kept |= new
            made |= own.outputs
            is_last = call.is_block and last_call[call.name] == i
            memories.append(
                CallMemory(
                    before=self.storages.num_bytes(before),
                    forward=cost.forward,
                    kept=self.storages.num_bytes(new) + cost.weight,
                    backward=cost.backward,
                    input_backward=cost.input_backward,
                    held=cost.held,
                    weight_backward=cost.weight_backward,
                    gradients=self.gradients.get(call.name, 0) if is_last else 0,
                )
            )
        return memories, kept

    def _cost(self, position: int) -> _Cost:
        """The memory of one call for itself."""
        call, own = self.flow.trace.calls[position], self.storages.of_calls[position]
        for loss in self.fused:
            if position == loss.loss:
                made = loss.logits + loss.weight + loss.rows
                return _cost(kept=frozenset(), forward=made, weight=loss.weight)
            if loss.head <= position < loss.loss:
                return _cost(kept=own.saved)
        if position not in self.blocks:
            return _of_glue(own, self.storages)
        return _of_block(own, self.modes.get(call.name, "none"), self.blocks[position], self.storages)


def _size(metas: Iterable[TensorMeta]) -> int:
    return sum(meta.num_bytes for meta in metas)


def _size_of_gradients(metas: Iterable[TensorMeta]) -> int:
    return sum(meta.num_bytes for meta in metas if meta.requires_grad)


@dataclass(frozen=True, kw_only=True)
class _Cost:
    """As of `CallMemory`, whatever other calls keep."""

    kept: frozenset[int]
    """Storages."""
    forward: int
    backward: int
    input_backward: int
    held: int
    weight_backward: int
    weight: int
    """Bytes of a gradient that the forward makes and the backward takes."""


def _cost(
    *,
    kept: frozenset[int],
    forward: int = 0,
    backward: int = 0,
    split: tuple[int, int, int] | None = None,
    weight: int = 0,
) -> _Cost:
    """With the backward in one piece, unless it is given how it is split."""
    backward += weight
    input_backward, held, weight_backward = split or (backward, 0, 0)
    return _Cost(
        kept=kept,
        forward=forward,
        backward=backward,
        input_backward=input_backward,
        held=held,
        weight_backward=weight_backward,
        weight=weight,
    )


def kept_storages(own: CallStorages, mode: Mode) -> frozenset[int]:
    """Storages that a call of a block keeps for its backward."""
    if mode == "none":
        return own.saved
    return own.sources if mode == "full" else own.sources | (own.costly - own.outputs)


def _of_block(own: CallStorages, mode: Mode, memory: BlockMemory, storages: StepStorages) -> _Cost:
    kept = kept_storages(own, mode)
    if mode == "none":
        split = (memory.input_backward, memory.held, memory.weight_backward)
        return _cost(kept=kept, forward=memory.forward, backward=memory.backward, split=split)
    again = storages.num_bytes((own.saved | own.slices.keys()) - kept)
    return _cost(
        kept=kept,
        forward=memory.forward_alone if mode == "full" else memory.forward,
        backward=max(again + memory.backward, memory.forward_alone),
    )


def _of_glue(own: CallStorages, storages: StepStorages) -> _Cost:
    made = storages.num_bytes(own.outputs - own.inputs)
    if not made:  # a view
        return _cost(kept=own.saved)
    return _cost(
        kept=own.saved,
        forward=storages.num_bytes((own.outputs | own.saved) - own.inputs),
        backward=made + (storages.num_bytes(own.inputs) if own.saved else 0),
    )
