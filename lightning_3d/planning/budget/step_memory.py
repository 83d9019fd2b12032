"""The peak of every rank's memory in a training step, predicted."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import torch
from torch import nn

from lightning_3d.activations.partitioned_inputs import is_cut
from lightning_3d.config.activations import Mode
from lightning_3d.memory.rank_memory import HeldMemory
from lightning_3d.model.blocks import kind_of
from lightning_3d.planning.loads import Inputs
from lightning_3d.planning.memory.block_memory import BlockMemory, measure_memory
from lightning_3d.planning.memory.fused_losses import fused_losses
from lightning_3d.planning.memory.sharded_storages import as_one_rank_keeps
from lightning_3d.planning.memory.stage_memory import MicrobatchMemory, StageMemory, kept_storages
from lightning_3d.planning.memory.timeline import peak_of_activations
from lightning_3d.planning.plan import Plan
from lightning_3d.planning.schedule_order import schedule_order
from lightning_3d.planning.stage_flow import StageFlow, cut
from lightning_3d.tensor.plan.block_plan import BlockTensorPlan
from lightning_3d.trace.storages import CallStorages, StepStorages
from lightning_3d.trace.trace import Trace


@dataclass(frozen=True, kw_only=True)
class StepMemory:
    """The memory of a training step of a plan, but for what ranks hold anyway.

    Args:
        flow: The trace of a microbatch, cut into the plan's stages.
        blocks: Position of a block's call in it -> what it takes.
        gradients: Block FQN -> bytes of its weights' gradients on a rank.
        accumulates: Whether gradients wait for further steps.
        fuses_loss: Whether heads run with their losses.
        is_unsplit: Whether the backward of all stages stays in one piece.
    """

    plan: Plan
    flow: StageFlow
    storages: StepStorages
    blocks: Mapping[int, BlockMemory]
    gradients: Mapping[str, int]
    accumulates: bool
    heads: Mapping[int, int]
    """Position of the call of a head that may run with its loss -> its number of classes on a rank."""
    is_unsplit: bool
    _stages: dict[object, StageMemory] = field(default_factory=dict, init=False, repr=False)

    def peaks(self, modes: Mapping[str, Mode], held: Sequence[HeldMemory]) -> list[int]:
        """Bytes at most, by index on the pp axis.

        Args:
            modes: Block FQN -> how it is recomputed; those that are missing are not.
            held: What the ranks hold, by index on the pp axis.
        """
        plan, peaks = self.plan, []
        is_whole = plan.loss == "whole"  # no backward begins before all forwards have run
        schedule = "gpipe" if is_whole else plan.schedule
        order = schedule_order(schedule, plan.stage_ranks, plan.num_microbatches)
        for rank, own in enumerate(held):
            numbers = plan.stages_on(rank)
            stages = {number: self._stage(number, modes) for number in numbers}
            recomputing = {
                stage for block in plan.blocks if modes.get(block.fqn, "none") != "none" for stage in block.stages
            }
            activations = peak_of_activations(
                order[rank],
                stages,
                own.gradients,
                accumulates=self.accumulates,
                keeps_gradients=plan.num_stages == 1,
                keeps_sent=plan.schedule not in ("1f1b", "gpipe"),
                keeps_sent_back=plan.schedule != "1f1b",
                unsplit=frozenset(numbers if self.is_unsplit else recomputing),
            )
            buffers = plan.num_microbatches * sum(stage.received for stage in stages.values())
            activations += sum(stage.casts for stage in stages.values())
            peaks.append(own.always + max(activations + buffers, own.gradients + buffers + own.step))
        return peaks

    def kept(self, fqn: str, mode: Mode) -> int:
        """Bytes that a block's calls keep of one microbatch."""
        calls = self._calls_of(fqn)
        return sum(self.storages.num_bytes(kept_storages(self.storages.of_calls[i], mode)) for i in calls)

    def cost(self, fqn: str, mode: Mode) -> int:
        """The time that recomputing a block takes, as a number to compare."""
        if mode == "none":
            return 0
        memories = [self.blocks[i] for i in self._calls_of(fqn)]
        return sum(memory.full_cost if mode == "full" else memory.selective_cost for memory in memories)

    def _calls_of(self, fqn: str) -> list[int]:
        return [i for i in self.blocks if self.flow.trace.calls[i].name == fqn]

    def _stage(self, stage: int, modes: Mapping[str, Mode]) -> StageMemory:
        own = tuple(sorted((fqn, mode) for fqn, mode in modes.items() if stage in self.plan.stages_of_calls[fqn]))
        if (stage, own) not in self._stages:
            fused = fused_losses(self.flow, self.storages, self.heads, modes)
            microbatch = MicrobatchMemory(
                flow=self.flow,
                storages=self.storages,
                blocks=self.blocks,
                modes=modes,
                gradients=self.gradients,
                fused=fused,
            )
            self._stages[stage, own] = microbatch.of_stage(stage, self.plan.stage_ranks)
        return self._stages[stage, own]


def step_memory(
    plan: Plan,
    blocks: Mapping[str, nn.Module],
    trace: Trace,
    device: torch.device,
    *,
    accumulates: bool,
    fuses_loss: bool,
    products: Collection[int],
    is_unsplit: bool,
    partitions: bool,
    num_sharing: int,
) -> StepMemory:
    """Measure what the calls of a trace take.

    Args:
        blocks: FQN -> block.
        trace: Of one microbatch, with its storages.
        device: Where it would run.
        products: Positions of calls of glue that make logits as heads do.
        num_sharing: Ranks that share the training state of a replica's weights.
        partitions: Whether tensor-parallel ranks keep slices of the inputs of recomputed blocks.
    """
    assert trace.storages is not None, "the trace notes its memory"
    flow = cut(trace, plan.stages_of_calls, plan.num_stages)
    storages = trace.storages
    measured: dict[object, BlockMemory] = {}
    of_calls, gradients, heads = {}, {}, {}
    tensor_plans = {block.fqn: block.tensor for block in plan.blocks if block.tensor and block.tensor.is_sharded}
    divided: set[int] = set()
    sliced: dict[int, list[int]] = {}
    for position, call in enumerate(trace.calls):
        if position in products:
            (output,) = call.outputs
            heads[position] = trace.tensors[output].shape[-1]
        if not call.is_block:
            continue
        block, inputs, tensor = blocks[call.name], trace.block_inputs[call.name], tensor_plans.get(call.name)
        own = storages.of_calls[position]
        kind = (kind_of(block), repr(inputs), tensor)
        if kind not in measured:
            measured[kind] = _measured(block, inputs, device, tensor) or _estimated(own, storages)
        memory = measured[kind]
        if tensor is not None and memory.kept is None:  # that of the whole block
            divided |= (own.saved | own.costly) - own.inputs - own.outputs
            memory = memory.divided(tensor.size, storages.num_bytes(own.outputs))
        of_calls[position] = memory
        if partitions and plan.shape.tp > 1:
            metas = {i: trace.tensors[i] for i in call.inputs}
            sliced[position] = [
                i for i, meta in metas.items() if is_cut(meta.shape, plan.shape.tp, requires_grad=meta.requires_grad)
            ]
        whole = _bytes_of_gradients(block, tensor)
        gradients[call.name] = _waiting(whole, plan, num_sharing)
        if fuses_loss and type(block) is nn.Linear:
            heads[position] = block.out_features // (1 if tensor is None else tensor.size)
    storages = storages.divided(divided, plan.shape.tp).with_slices(sliced, plan.shape.tp)
    storages = as_one_rank_keeps(trace, storages, of_calls)
    return StepMemory(
        plan=plan,
        flow=flow,
        storages=storages if plan.shape.pp == 1 else storages.without_casts(),
        blocks=of_calls,
        gradients=gradients,
        accumulates=accumulates,
        heads=heads,
        is_unsplit=is_unsplit,
    )


def _measured(
    block: nn.Module, inputs: Inputs, device: torch.device, tensor: BlockTensorPlan | None
) -> BlockMemory | None:
    """That of one tensor-parallel rank, else of the whole block; None if that needs data."""
    if tensor is not None and not tensor.has_vocabulary:
        with suppress(Exception):
            return measure_memory(block, inputs, device, tensor)
    with suppress(Exception):
        return measure_memory(block, inputs, device)
    return None


def _bytes_of_gradients(block: nn.Module, tensor: BlockTensorPlan | None) -> int:
    """On one rank of the tensor axis."""
    trained = {fqn: p for fqn, p in block.named_parameters() if p.requires_grad}
    sharded = set() if tensor is None else {w.fqn for w in tensor.weights if w.shard_dim is not None}
    size = 1 if tensor is None else tensor.size
    return sum(p.nbytes // (size if fqn in sharded else 1) for fqn, p in trained.items())


def _waiting(gradients: int, plan: Plan, num_sharing: int) -> int:
    """Bytes of a block's gradients between its backward and the end of that of all."""
    if plan.shape.dp == 1 or plan.zero_stage == 0:
        return gradients
    if plan.zero_stage < 3:  # whole in buckets, what a collective gives, and the gradients that come of it
        return gradients + 2 * gradients // plan.shape.dp
    # FSDP2 reduces those of a unit when its backward has run; with a pipeline after that of all microbatches.
    return gradients // num_sharing if plan.shape.pp == 1 else gradients


def _estimated(own: CallStorages, storages: StepStorages) -> BlockMemory:
    """By what a call was seen to keep and to return."""
    kept = storages.num_bytes(own.saved | own.outputs)
    returned = storages.num_bytes(own.outputs)
    return BlockMemory(
        forward=kept,
        forward_alone=kept,
        backward=2 * returned,
        input_backward=2 * returned,
        held=returned,
        weight_backward=returned,
        full_cost=kept,
        selective_cost=kept,
    )
