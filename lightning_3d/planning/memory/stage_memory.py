"""The memory of one microbatch on one stage, call by call."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from lightning_3d.config.activations import Mode
from lightning_3d.planning.memory.block_memory import BlockMemory
from lightning_3d.planning.stage_flow import StageFlow
from lightning_3d.trace.ghost import TensorMeta
from lightning_3d.trace.storages import CallStorages, StepStorages
from lightning_3d.trace.trace import TracedCall


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
    """The buffers for what it receives from other ranks, in the forward and in the backward."""
    sent: int
    """Sent to another rank in its forward."""
    sent_back: int
    """Sent to another rank in its backward."""

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
    """Position of the loss's."""
    logits: int
    """Bytes that its forward takes at once, and its gradients."""
    rows: int
    """Bytes of the gradient of its rows, which it holds until its backward ends, as it does the rows."""
    weight: int
    """Bytes of the gradient of its weight, which its backward takes."""


def stage_memory(
    flow: StageFlow,
    stage: int,
    storages: StepStorages,
    blocks: Mapping[int, BlockMemory],
    modes: Mapping[str, Mode],
    gradients: Mapping[str, int],
    stage_ranks: Sequence[int],
    fused: Sequence[FusedLoss] = (),
) -> StageMemory:
    """Add up one stage.

    Args:
        storages: Of the calls of ``flow``.
        blocks: Position of a block's call -> what it takes.
        modes: Block FQN -> how it is recomputed.
        gradients: Block FQN -> bytes of its weights' gradients.
        stage_ranks: For every stage the index of its rank.
    """
    calls = [(i, call) for i, call in enumerate(flow.trace.calls) if flow.call_stages[i] == stage]
    elsewhere = {storages.of_tensors[i] for i in flow.received(stage) if i in storages.of_tensors}
    last_use: dict[int, int] = {}
    for i, _ in calls:
        last_use |= dict.fromkeys(storages.of_calls[i].inputs, i)
    counted = set(elsewhere)
    made: set[int] = set()
    memories = []
    heads = {loss.head: loss for loss in fused}
    losses = {loss.loss: loss for loss in fused}
    without = {n for loss in fused for n in storages.of_calls[loss.head].outputs}
    inside = {i for loss in fused for i in range(loss.head, loss.loss + 1)}
    for position, (i, call) in enumerate(calls):
        own, memory = storages.of_calls[i], blocks.get(i)
        waiting = {number for number in made if last_use.get(number, -1) >= i} - without
        before = storages.num_bytes((counted | waiting) - elsewhere)
        mode = modes.get(call.name, "none") if call.is_block else "none"
        kept = kept_storages(own, mode)
        if i in inside:
            kept = kept - without - (own.saved if i in losses else set())
        new = kept - counted
        counted |= new
        made |= own.outputs
        cost = _glue(own, storages) if memory is None else _block(own, mode, memory, storages)
        extra = 0
        if i in inside:
            cost = _NOTHING
        if i in losses:
            extra = losses[i].weight
            cost = _Cost(forward=losses[i].logits + extra + losses[i].rows, backward=extra, split=(extra, 0, 0))
        memories.append(
            CallMemory(
                before=before,
                forward=cost.forward,
                kept=storages.num_bytes(new) + extra,
                backward=cost.backward,
                input_backward=cost.split[0],
                held=cost.split[1],
                weight_backward=cost.split[2],
                gradients=_gradients(call, [later for _, later in calls[position + 1 :]], gradients),
            )
        )
    sent = {storages.of_tensors[i] for i in flow.sent(stage) if i in storages.of_tensors}
    rows = {number for loss in heads.values() for number in storages.of_calls[loss.head].inputs}
    held = storages.num_bytes((sent | (rows if any(i in losses for i, _ in calls) else set())) - counted)
    received, handed_on = flow.metas(flow.received(stage)), flow.metas(flow.sent(stage))
    gets = stage > 0 and stage_ranks[stage - 1] != stage_ranks[stage]
    gives = stage + 1 < flow.num_stages and stage_ranks[stage + 1] != stage_ranks[stage]
    return StageMemory(
        calls=tuple(memories),
        until_end=held + sum(losses[i].rows for i, _ in calls if i in losses),
        received=gets * _size(received) + gives * _size_of_gradients(handed_on),
        sent=gives * _size(handed_on),
        sent_back=gets * _size_of_gradients(received),
    )


def _size(metas: Iterable[TensorMeta]) -> int:
    return sum(meta.num_bytes for meta in metas)


def _size_of_gradients(metas: Iterable[TensorMeta]) -> int:
    return sum(meta.num_bytes for meta in metas if meta.requires_grad)


@dataclass(frozen=True, kw_only=True)
class _Cost:
    forward: int
    backward: int
    split: tuple[int, int, int]


_NOTHING = _Cost(forward=0, backward=0, split=(0, 0, 0))


def kept_storages(own: CallStorages, mode: Mode) -> set[int]:
    """Storages that a call of a block keeps for its backward."""
    if mode == "none":
        return set(own.saved)
    return set(own.inputs if mode == "full" else own.inputs | (own.costly - own.outputs))


def _block(own: CallStorages, mode: Mode, memory: BlockMemory, storages: StepStorages) -> _Cost:
    if mode == "none":
        split = (memory.input_backward, memory.held, memory.weight_backward)
        return _Cost(forward=memory.forward, backward=memory.backward, split=split)
    again = storages.num_bytes(own.saved - kept_storages(own, mode))
    forward = memory.forward_alone if mode == "full" else memory.forward
    backward = max(again + memory.backward, memory.forward_alone)
    return _Cost(forward=forward, backward=backward, split=(backward, 0, 0))


def _glue(own: CallStorages, storages: StepStorages) -> _Cost:
    made = storages.num_bytes(own.outputs - own.inputs)
    if not made:  # a view
        return _NOTHING
    backward = made + (storages.num_bytes(own.inputs) if own.saved else 0)
    forward = storages.num_bytes((own.outputs | own.saved) - own.inputs)
    return _Cost(forward=forward, backward=backward, split=(backward, 0, 0))


def _gradients(call: TracedCall, later: Sequence[TracedCall], gradients: Mapping[str, int]) -> int:
    if not call.is_block or any(other.is_block and other.name == call.name for other in later):
        return 0
    return gradients.get(call.name, 0)
