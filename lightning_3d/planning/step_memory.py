"""The peak of every rank's memory in a training step, predicted: what the schedule has in flight, times what a
microbatch keeps, and the largest call on top.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import nn

from lightning_3d.activations.partitioned_inputs import is_cut
from lightning_3d.config.activations import Mode
from lightning_3d.config.settings import ThreeDConfig
from lightning_3d.context.dims import SequenceDims
from lightning_3d.distributed.machine import Work
from lightning_3d.distributed.mesh import MeshShape
from lightning_3d.memory.block_cost import FLOPS_PER_BYTE, BlockCost, block_costs
from lightning_3d.memory.rank_memory import StaticMemory
from lightning_3d.planning.observer import Observation
from lightning_3d.planning.plan import Plan
from lightning_3d.planning.schedule_order import Computation, schedule_order
from lightning_3d.planning.shares import num_shards, num_sharing_of
from lightning_3d.planning.slices import between_stages, first_with_sequence, on_slices, sequence_of
from lightning_3d.planning.stage_flow import StageFlow, cut_at_calls, stage_of_call
from lightning_3d.tensor.plan.block_plan import BlockTensorPlan
from lightning_3d.tensor.vocabulary.chunked_loss import chunk_length
from lightning_3d.trace.ghost import TensorMeta
from lightning_3d.trace.output_uses import LOG, LOSS, LOSS_OF_LOG
from lightning_3d.trace.storages import CallStorages, StepStorages
from lightning_3d.trace.trace import Trace

Calls = tuple[int, ...]
"""The calls of blocks that a stage makes, by their numbers in the trace, ascending."""

_WIDE = 4  # bytes of a number of fp32, in which gradients of weights add up


@dataclass(frozen=True, kw_only=True)
class _CallMemory:
    """Bytes of one call."""

    storages: frozenset[int]
    """Ids in the trace of those that it keeps for its backward."""
    inside: int = 0
    """Kept besides these."""
    forward: int = 0
    """Peak of its forward."""
    backward: int = 0
    """Peak of its backward above what is kept."""


@dataclass(frozen=True, kw_only=True)
class _FusedLoss:
    """A head that runs with its loss."""

    calls: Mapping[int, _CallMemory]
    """Position of a call from the head to its loss -> what it takes."""
    absent: frozenset[int]
    """Storages that never exist."""


@dataclass(frozen=True, kw_only=True)
class StageMemory:
    """Bytes of one microbatch on one stage."""

    forward: int
    """Peak of its forward."""
    kept: int
    """Between forward and backward."""
    backward: int
    """Peak of its backward, with what was kept."""
    first_backward: int
    """The same in the first microbatch's, which makes the gradients of weights."""
    gradients: int
    split: int
    """Left for the gradients of the weights by a backward that is split."""
    received: int
    """Buffers for what it receives, in the forward and in the backward; torch keeps them from step to step."""
    sent: int
    """Tensors that were sent, and wait until the step ends."""
    casts: int
    """Copies that autocast makes of weights, which all microbatches of a step share."""


class StepMemory:
    """The memory of a training step, but for what ranks hold anyway: of a plan's stages, and of those that it may have.

    A stage is given by its calls of blocks, numbered as in the trace. What glue follows a call goes with it.

    Args:
        observed: With a trace of one microbatch and its storages.
        tensors: Block FQN -> how its weights are sharded over tp, or why they are not.
        device: Where it would run.
    """

    def __init__(
        self,
        observed: Observation,
        tensors: Mapping[str, BlockTensorPlan],
        config: ThreeDConfig,
        shape: MeshShape,
        device: torch.device,
    ) -> None:
        trace, blocks = observed.trace, observed.blocks
        assert trace is not None
        assert trace.storages is not None, "the trace notes its memory"
        tensors = {fqn: tensor for fqn, tensor in tensors.items() if tensor.is_sharded}
        self._config, self._shape, self._accumulates = config, shape, observed.step.accumulates
        self._ranks = config.pipeline.stage_ranks(shape.pp)
        # Where the loss is the whole batch's, no backward begins before all forwards have run.
        schedule = "gpipe" if config.pipeline.loss == "whole" else config.pipeline.schedule
        self._orders = schedule_order(schedule, self._ranks, config.num_microbatches)
        self._sequence_dims = SequenceDims(config.context, blocks)
        first = first_with_sequence(trace, self._sequence_dims) if shape.cp > 1 else None
        self._storages = trace.storages if first is None else on_slices(trace.storages, first, shape.cp)
        self._trace, self._flow = trace, cut_at_calls(trace)
        self._positions: dict[int, list[int]] = {}  # number of a call of a block -> in the trace, with its glue
        for position, number in enumerate(self._flow.call_stages):
            self._positions.setdefault(number, []).append(position)
        self._cut_along_sequence = {fqn for fqn, tensor in tensors.items() if tensor.is_sequence_parallel}
        with observed.step.modes():
            measured = block_costs(blocks, trace, device, tensors)
        self.is_measured = all(cost is not None for cost in measured.values())
        """Whether no block needs data to be measured; what those that do take is estimated."""
        self.costs: dict[str, BlockCost] = {}
        """Block FQN -> what a call takes."""
        self._gradients: dict[str, int] = {}  # block FQN -> bytes of its weights' gradients on a rank
        # Position of the call of a head that may run with its loss -> what it takes then.
        self._fused: dict[int, _FusedLoss] = {}
        self._stages: dict[object, StageMemory] = {}
        self._calls: dict[tuple[int, Mode], _CallMemory] = {}
        for position, call in enumerate(trace.calls):
            if not call.is_block:
                continue
            block, tensor = blocks[call.name], tensors.get(call.name)
            cost = measured[call.name]
            if cost is not None and first is not None and position >= first:
                given = sequence_of(trace, call.name, self._sequence_dims)
                cost = cost.of_slice(shape.cp, 0 if given is None else given.num_bytes)
            self.costs[call.name] = cost or _estimated(self._storages.of_calls[position], self._storages)
            self._gradients[call.name] = _waiting(_bytes_of_gradients(block, tensor), config, shape)
            is_fused = config.activations.fused_loss == "auto" and (shape.cp == 1 or tensor is None)
            if is_fused and type(block) is nn.Linear:
                num_classes = block.out_features // (1 if tensor is None else tensor.size)
                if (fused := _fused_loss(position, num_classes, trace, self._storages, shape.cp)) is not None:
                    self._fused[position] = fused

    def stages_on(self, plan: Plan, rank: int) -> dict[int, Calls]:
        """The stages that a rank of the pp axis runs in a plan -> their calls."""
        of_calls = [stage_of_call(call, plan.stages_of_calls) for call in self._trace.block_calls]
        return {s: tuple(i for i, of_call in enumerate(of_calls) if of_call == s) for s in plan.stages_on(rank)}

    def peak(self, rank: int, calls: Mapping[int, Calls], modes: Mapping[str, Mode], held: StaticMemory) -> int:
        """Bytes at most.

        Args:
            rank: Index on the pp axis.
            calls: Of stages on this rank, as if it ran no other.
            modes: Block FQN -> how it is recomputed; those that are missing are not.
            held: What the rank holds anyway.
        """
        stages = {stage: self._stage(stage, own, modes) for stage, own in calls.items()}
        is_whole = self._config.compile.enabled
        recomputing = {
            stage
            for stage, own in calls.items()
            if is_whole or any(modes.get(self._trace.block_calls[i].name, "none") != "none" for i in own)
        }
        order = [each for each in self._orders[rank] if each.stage in stages]
        activations = self._peak_of(order, stages, held.gradients, recomputing)
        buffers = self._config.num_microbatches * sum(stage.received for stage in stages.values())
        activations += sum(stage.casts for stage in stages.values())
        return held.always + buffers + max(activations, held.gradients + held.step)

    def _peak_of(
        self,
        order: Iterable[Computation],
        stages: Mapping[int, StageMemory],
        gradients: int,
        full_backward_stages: Collection[int],
    ) -> int:
        """Activations, and gradients as they come.

        Args:
            gradients: Of all stages, when the step has ended.
            full_backward_stages: Stages whose backward stays in one piece.
        """
        # Without a pipeline, a step's gradients are freed between the next one's forward and backward.
        are_freed = len(self._ranks) == 1 and not self._accumulates
        with_gradients = set(stages) if self._accumulates else set[int]()
        now, alive, peak = gradients if are_freed or self._accumulates else 0, 0, 0
        for kind, stage, _ in order:
            own = stages[stage]
            if kind == "forward":
                peak = max(peak, now + alive + own.forward)
                alive += own.kept
                continue
            if kind == "weight" and stage in full_backward_stages:
                continue
            now, are_freed = 0 if are_freed else now, False
            is_split = kind == "input" and stage not in full_backward_stages
            is_first = stage not in with_gradients and not is_split
            peak = max(peak, now + alive + (own.first_backward if is_first else own.backward) - own.kept)
            if is_split:
                alive += own.split
                continue
            alive += own.sent - own.kept - (own.split if kind == "weight" else 0)
            now += own.gradients if is_first else 0
            with_gradients.add(stage)
        return max(peak, alive + gradients)

    def kept(self, fqn: str, mode: Mode) -> int:
        """Bytes that a block's calls keep of one microbatch."""
        calls = [self._call(i, mode) for i in self._calls_of(fqn)]
        return sum(self._storages.num_bytes(call.storages) + call.inside for call in calls)

    def recomputation(self, fqn: str, mode: Mode) -> int:
        """Operations that recomputing a block's calls takes."""
        return len(self._calls_of(fqn)) * self.costs[fqn].recomputation(mode)

    def recomputed_share(self, modes: Mapping[str, Mode]) -> float:
        """The operations that recomputation takes, over those of the blocks' forwards and backwards without it."""
        recomputed = sum(self.recomputation(fqn, mode) for fqn, mode in modes.items())
        return recomputed / max(sum(len(self._calls_of(fqn)) * cost.time for fqn, cost in self.costs.items()), 1)

    def work(self, calls: Calls, modes: Mapping[str, Mode]) -> Work:
        """The forward and the backward of a microbatch of a stage on a rank."""
        total = Work()
        for call in (self._trace.calls[i] for number in calls for i in self._positions.get(number, ())):
            if call.is_block:
                cost = self.costs[call.name]
                again = cost.recomputation(modes.get(call.name, "none")) / max(cost.time, 1)
                total += cost.work.times(1 + again)
            else:  # its forward writes its results, its backward as much
                total += Work(written=2 * _size(self._trace.tensors[i] for i in call.outputs), calls=2)
        return total

    @property
    def operations(self) -> list[int]:
        """The operations of a rank, for each call of a block and the glue that follows it."""
        works = [self.work((number,), {}) for number in range(len(self._trace.block_calls))]
        return [int(work.flops + FLOPS_PER_BYTE * work.written) for work in works]

    def sent_for_slices(self, fqn: str) -> int:
        """Bytes that a rank sends for a block's forward and backward on slices of sequences, about: all-to-alls of
        queries, keys, values and outputs, and of their gradients.
        """
        cp, of_calls = self._shape.cp, len(self._calls_of(fqn))
        given = sequence_of(self._trace, fqn, self._sequence_dims) if cp > 1 else None
        return 0 if given is None else of_calls * 8 * given.num_bytes * (cp - 1) // cp**2

    def _calls_of(self, fqn: str) -> list[int]:
        return [i for i, call in enumerate(self._trace.calls) if call.is_block and call.name == fqn]

    def _stage(self, stage: int, calls: Calls, modes: Mapping[str, Mode]) -> StageMemory:
        ranks = self._ranks
        gets = stage > 0 and ranks[stage - 1] != ranks[stage]
        gives = stage + 1 < len(ranks) and ranks[stage + 1] != ranks[stage]
        names = (self._trace.block_calls[number].name for number in calls)
        key = calls, gets, gives, tuple(modes.get(name, "none") for name in names)
        if key not in self._stages:
            self._stages[key] = self._add_up(calls, modes, gets=gets, gives=gives)
        return self._stages[key]

    def _add_up(self, calls: Calls, modes: Mapping[str, Mode], *, gets: bool, gives: bool) -> StageMemory:
        """The memory of a stage.

        Args:
            gets: Whether what it receives comes from another rank.
            gives: Whether what it sends goes to one.
        """
        flow, storages = self._flow, self._storages
        positions = [i for number in calls for i in self._positions[number]]
        fused, absent = self._fused_losses(positions, modes)
        costs = [fused[i] if i in fused else self._call(i, self._mode(i, modes)) for i in positions]
        received = _crossing(flow, {number - 1 for number in calls} - {*calls})
        sent = _crossing(flow, {number for number in calls if number + 1 not in calls})
        here = kept = self._storages_of(received) | absent
        forward = total = 0
        sizes = []
        for position, call in zip(positions, costs, strict=True):
            waiting = storages.num_bytes(storages.of_calls[position].inputs - kept)
            forward = max(forward, total + waiting + call.forward)
            sizes.append(storages.num_bytes(call.storages - kept) + call.inside)
            kept |= call.storages
            total += sizes[-1]
        if gives:  # what stays on this rank lies in the next stage's buffers
            total += storages.num_bytes(self._storages_of(sent) - kept - here)
        last = {self._trace.calls[i].name: i for i in positions if self._trace.calls[i].is_block}
        alive, gradients, backward, first = total, 0, 0, 0
        for position, call, size in reversed(list(zip(positions, costs, sizes, strict=True))):
            backward, first = max(backward, alive + call.backward), max(first, alive + gradients + call.backward)
            alive -= size
            name = self._trace.calls[position].name
            if position == last.get(name):
                gradients += self._gradients[name]
                first = max(first, alive + gradients)
        of_received, of_sent = (
            between_stages(self._trace, ids, self._sequence_dims, self._shape.cp) for ids in (received, sent)
        )
        given, returned = gives * _size(of_sent), gets * _size_of_gradients(of_received)
        blocks = [self._trace.block_calls[number].name for number in calls]
        schedule = self._config.pipeline.schedule
        return StageMemory(
            forward=forward,
            kept=total,
            backward=backward,
            first_backward=first,
            gradients=gradients,
            split=sum(self.costs[fqn].costly + self.costs[fqn].returned for fqn in blocks),
            received=_size(of_received) + _size_of_gradients(of_sent),
            # Torch's schedules of several stages on a rank, and GPipe in the backward, wait for all at the end.
            sent=(0 if schedule in ("1f1b", "gpipe") else given) + (0 if schedule == "1f1b" else returned),
            casts=sum(self.costs[fqn].casts for fqn in dict.fromkeys(blocks)),
        )

    def _storages_of(self, tensors: Iterable[int]) -> frozenset[int]:
        of_tensors = self._storages.of_tensors
        return frozenset(of_tensors[i] for i in tensors if i in of_tensors)

    def _mode(self, position: int, modes: Mapping[str, Mode]) -> Mode:
        call = self._trace.calls[position]
        return modes.get(call.name, "none") if call.is_block else "none"

    def _call(self, position: int, mode: Mode) -> _CallMemory:
        if (position, mode) not in self._calls:
            is_block = self._trace.calls[position].is_block
            self._calls[position, mode] = self._of_block(position, mode) if is_block else self._of_glue(position)
        return self._calls[position, mode]

    def _of_glue(self, position: int) -> _CallMemory:
        own = self._storages.of_calls[position]
        made = self._storages.num_bytes(own.outputs - own.inputs)
        if not made:  # a view
            return _CallMemory(storages=own.saved)
        return _CallMemory(
            storages=own.saved,
            forward=self._storages.num_bytes((own.outputs | own.saved) - own.inputs),
            backward=made + (self._storages.num_bytes(own.inputs) if own.saved else 0),
        )

    def _of_block(self, position: int, mode: Mode) -> _CallMemory:
        call, own = self._trace.calls[position], self._storages.of_calls[position]
        cost = self.costs[call.name]
        inside = cost.kept(mode)
        if mode == "none":
            storages = own.saved & (own.inputs | own.outputs)
            if call.name in self._cut_along_sequence:  # keeps a slice of its first input, which is inside
                storages -= self._storages_of(call.inputs[:1])
            return _CallMemory(storages=storages, inside=inside, forward=cost.forward, backward=cost.backward)
        tp, cut_ = self._shape.tp, frozenset[int]()
        if self._config.activations.partition and tp > 1:
            metas = {i: self._trace.tensors[i] for i in call.inputs}
            cut_ = self._storages_of(i for i, m in metas.items() if is_cut(m.shape, tp, requires_grad=m.requires_grad))
        whole = self._storages.num_bytes(cut_)
        return _CallMemory(
            storages=own.inputs - cut_,
            inside=inside + whole // tp,
            forward=cost.forward_alone if mode == "full" else cost.forward,
            backward=max(whole + max(cost.saved - inside, 0) + cost.backward, cost.forward_alone),
        )

    def _fused_losses(
        self, positions: Collection[int], modes: Mapping[str, Mode]
    ) -> tuple[dict[int, _CallMemory], frozenset[int]]:
        """The heads among some calls: position of a call from a head to its loss -> what it takes, and the storages
        that never exist. Recomputation leaves a head alone.
        """
        run = [loss for head, loss in self._fused.items() if head in positions and self._mode(head, modes) == "none"]
        calls = {position: call for loss in run for position, call in loss.calls.items()}
        return calls, frozenset[int]().union(*(loss.absent for loss in run))


def _crossing(flow: StageFlow, boundaries: Collection[int]) -> tuple[int, ...]:
    """Ids of the tensors that cross any of these boundaries."""
    crossings = (flow.crossings[i] for i in boundaries if 0 <= i < len(flow.crossings))
    return tuple(sorted({number for ids in crossings for number in ids}))


def _fused_loss(
    head: int, num_classes: int, trace: Trace, storages: StepStorages, num_slices: int
) -> _FusedLoss | None:
    """A head whose logits go to a cross entropy and nowhere else, as it runs with it in chunks of rows.

    Args:
        head: Position of its call.
        num_classes: On a rank.
        num_slices: Of each sequence, of which a rank has one.
    """
    if (way := _way_to_loss(head, trace, storages)) is None:
        return None
    loss, made = way
    meta = trace.tensors[trace.calls[head].outputs[0]]
    num_rows = meta.num_bytes // meta.dtype.itemsize // num_classes // num_slices
    inputs = storages.of_calls[head].inputs
    rows = storages.num_bytes(inputs)
    weight = num_classes * (rows // max(num_rows, 1) // meta.dtype.itemsize) * _WIDE
    chunk = min(chunk_length(num_rows, num_classes, meta.device.type), num_rows) * num_classes * _WIDE
    calls = {i: _CallMemory(storages=storages.of_calls[i].saved - made) for i in range(head, loss)}
    # Its forward makes the gradients of rows and of the weight, which wait for the backward.
    calls[loss] = _CallMemory(storages=inputs, inside=rows + weight, forward=3 * chunk + weight + rows, backward=weight)
    return _FusedLoss(calls=calls, absent=made)


def _way_to_loss(head: int, trace: Trace, storages: StepStorages) -> tuple[int, frozenset[int]] | None:
    """The position of the one loss of a head's logits, and the storages of these and of logarithms made of them."""
    family, logs, loss = storages.of_calls[head].outputs, frozenset[int](), None
    for i in range(head + 1, len(trace.calls)):
        name, own = trace.calls[i].name, storages.of_calls[i]
        if not own.inputs & family:
            continue
        if loss is not None:
            return None
        if name == LOSS or (name == LOSS_OF_LOG and own.inputs & logs):
            loss = i
        elif name == LOG:
            family, logs = family | own.outputs, logs | own.outputs
        elif own.outputs - family:  # more than views
            return None
    return None if loss is None else (loss, family)


def _size(metas: Iterable[TensorMeta]) -> int:
    return sum(meta.num_bytes for meta in metas)


def _size_of_gradients(metas: Iterable[TensorMeta]) -> int:
    return sum(meta.num_bytes for meta in metas if meta.requires_grad)


def _bytes_of_gradients(block: nn.Module, tensor: BlockTensorPlan | None) -> int:
    """On one rank of the tensor axis."""
    shards = num_shards(tensor)
    return sum(p.nbytes // shards.get(fqn, 1) for fqn, p in block.named_parameters() if p.requires_grad)


def _waiting(gradients: int, config: ThreeDConfig, shape: MeshShape) -> int:
    """Bytes of a block's gradients between its backward and the end of that of all."""
    of_state = shape.size("state")
    if of_state == 1 or config.zero.stage == 0:
        return gradients
    if config.zero.stage < 3:  # whole in buckets, what a collective gives, and the gradients that come of it
        return gradients + 2 * gradients // of_state
    # FSDP2 reduces those of a unit when its backward has run; with a pipeline after that of all microbatches.
    return gradients // num_sharing_of(config.zero, shape) if shape.pp == 1 else gradients


def _estimated(own: CallStorages, storages: StepStorages) -> BlockCost:
    """The cost of a block that needs data, by what a call was seen to keep and to return."""
    saved, returned = storages.num_bytes(own.saved - own.inputs - own.outputs), storages.num_bytes(own.outputs)
    kept = saved + returned
    return BlockCost(
        saved=saved,
        costly=saved,
        casts=0,
        returned=returned,
        forward=kept,
        forward_alone=kept,
        backward=2 * returned,
        full_time=kept,
        selective_time=kept,
        time=3 * kept,
    )
