"""One step on one batch: what a stage does with each microbatch, and what the stages tell of the outcome."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor

from lightning_3d.context.steps import ContextSteps
from lightning_3d.distributed.rng import StepRandomness
from lightning_3d.pipeline.attempt import Failure
from lightning_3d.pipeline.batch_loss import LossReduction
from lightning_3d.pipeline.effects.effect import StepContext
from lightning_3d.pipeline.effects.merge import Merger
from lightning_3d.pipeline.effects.step_effects import StepEffects
from lightning_3d.pipeline.glue_seen import HandedOver, UnseenError
from lightning_3d.pipeline.loss import check_loss
from lightning_3d.pipeline.stage_run import Crossing, Draw, StageRun, plain_call
from lightning_3d.pipeline.traces import StepCall
from lightning_3d.pipeline.whole_loss_code import WholeLossCode, loss_to_come
from lightning_3d.planning.stage_flow import StageFlow
from lightning_3d.torch_internals.dispatch import no_dispatch_modes
from lightning_3d.torch_internals.pytree import tree_map_only
from lightning_3d.trace.ghost import TensorMeta
from lightning_3d.trace.interception import Router
from lightning_3d.trace.side_outputs import attributes_kept
from lightning_3d.zero.engine import RankModule


@dataclass(frozen=True, kw_only=True)
class StageReport:
    """The outcome of a step on the whole batch, as far as a stage knows it."""

    stage: int
    output: object
    """The step's return value, joined over microbatches; None except from the last stage."""
    effects: Sequence[object]
    """By effect, in order: what it did, joined over microbatches."""


@dataclass(frozen=True, kw_only=True)
class Stages:
    """The stages of this rank, and what they run with."""

    own: Sequence[int]
    """Their indices, ascending."""
    last: int
    """The pipeline's last one."""
    module: LightningModule
    rank_module: RankModule
    """The root of this rank's shards, around ``module``."""
    router: Router
    effects: StepEffects
    merger: Merger
    randomness: StepRandomness
    context: ContextSteps | None
    """Runs stages on slices of sequences, where ranks share these."""
    sit_out: Callable[[Sequence[str]], bool]
    """Told which blocks would run now, by FQN, in the collectives of whose weights this rank takes part for others;
    returns whether it can."""

    def crossing(self, flow: StageFlow, ids: tuple[int, ...]) -> tuple[TensorMeta, ...]:
        """The parts of tensors, by their ids, that this rank sends from one stage to the next, or receives."""
        return flow.metas(ids) if self.context is None else tuple(self.context.crossing(flow.trace, i) for i in ids)


@dataclass(frozen=True, kw_only=True)
class PipelineStep:
    """A step of the user's module."""

    stages: Stages
    parts: Sequence[StepCall]
    """Its calls on the microbatches."""
    flows: Sequence[StageFlow]
    """Their cut traces."""
    loss_code: WholeLossCode | None
    """The code that no block depends on, where it runs on the whole batch."""
    decision: LossReduction
    number: int
    """Counts the steps, for their random numbers."""
    backward: bool
    loss_scale: float
    outputs: dict[int, object] = field(default_factory=dict)
    """Microbatch -> what the step returned for it, filled on the last stage; a tail has only one."""
    unseen: list[UnseenError] = field(default_factory=list)
    """By run of a microbatch that did otherwise than those that were studied; the step fails when all have run."""
    failures: list[Failure] = field(default_factory=list)
    """Why this rank can't go on with it, see [Note: steps that fail]."""

    @property
    def failure(self) -> Failure | None:
        """The first one."""
        return min(self.failures, key=lambda failure: failure.position, default=None)

    def fail(self, failure: Failure) -> None:
        """Go on with zeros from now on; raise it where the others can't."""
        if self.flows and not self.failures:
            own, flow = set(self.stages.own), self.flows[0]
            pairs = zip(flow.trace.calls, flow.call_stages, strict=True)
            if not self.stages.sit_out([call.name for call, stage in pairs if call.is_block and stage in own]):
                failure.error.add_note("It does not run inline, as with zero.reshard_after_forward=True replicas wait.")
                raise failure.error
        self.failures.append(failure)

    def fail_backward(self, error: Exception, index: int, stage: int) -> None:
        """Go on with zeros after the backward of a microbatch that raised."""
        self.fail(Failure(error=error, microbatch=index, in_backward=True, stage=stage))

    def forward(self, stage: int, index: int, received: tuple[Tensor, ...]) -> Any:
        """Run a microbatch on a stage; returns the tensors to send, or the weighted loss on the last stage."""
        if not self.failures:
            try:
                return self._forward(stage, index, received)
            except Exception as error:
                self.fail(Failure(error=error, microbatch=index, stage=stage))
        return self._zeros(stage, index, received)

    def _zeros(self, stage: int, index: int, received: tuple[Tensor, ...]) -> Tensor | tuple[Tensor, ...]:
        """Zeros, as a stage sends them that has failed."""
        if stage == self.stages.last:
            return loss_to_come(received, lambda: [None] * len(received)) if self.backward else ()
        flow, device = self.flows[index], self.stages.module.device
        metas = [meta.on_meta() for meta in self.stages.crossing(flow, flow.sent(stage))]
        return tuple(torch.zeros_like(meta, device=device, requires_grad=meta.requires_grad) for meta in metas)

    def _forward(self, stage: int, index: int, received: tuple[Tensor, ...]) -> Any:
        part, flow, loss_code, weight = (
            self.parts[index],
            self.flows[index],
            self.loss_code,
            self.decision.weights[index],
        )
        if stage < self.stages.last:
            return self._run(stage, index, part, flow, received)
        if loss_code is None:
            return self._loss(stage, index, part, flow, received, weight)
        sent = self._run(stage, index, part, flow, received)
        is_last = loss_code.take(index, sent)
        if not loss_code.trains:
            return self._loss(loss_code.stage, index, part, flow, sent, weight)
        if is_last:
            self._run_loss_code(loss_code)
        if not self.backward:
            return ()
        return loss_to_come(sent, lambda: [None] * len(sent) if self.failures else loss_code.gradients(index))

    def finish(self) -> list[StageReport]:
        """After all microbatches: the reports of this rank's stages, and of the tail; none where the step failed."""
        if not self.failures:
            try:
                self._end()
                return self._reports()
            except Exception as error:
                self.failures.append(Failure(error=error, microbatch=len(self.parts)))
        return []

    def _end(self) -> None:
        """Run the tail on the whole batch for what it gives besides gradients."""
        if self.decision.problem is not None:
            raise self.decision.problem
        if self.unseen:
            raise self.unseen[0]
        if self.loss_code is not None and not self.loss_code.trains and self.stages.last in self.stages.own:
            with torch.no_grad(), no_dispatch_modes():  # they have seen this code run by microbatch
                self._run_loss_code(self.loss_code)

    def _run_loss_code(self, loss_code: WholeLossCode) -> None:
        loss = self._loss(loss_code.stage, 0, loss_code.call, loss_code.flow, loss_code.received(), weight=1.0)
        if self.backward and loss_code.trains:
            with torch.autocast(loss.device.type, enabled=False):  # as a backward after the step is
                loss.backward()
            loss_code.end_backward()

    def _loss(
        self, stage: int, index: int, part: StepCall, flow: StageFlow, received: Sequence[Tensor], weight: float
    ) -> Any:
        """Run the stage, or the tail, that ends the step; returns its loss times a weight if it is differentiated."""
        output = self._run(stage, index, part, flow, received)
        if not (self.backward and torch.is_grad_enabled()):
            return ()
        loss = _weighted(check_loss(output).reshape(()), weight)
        return loss if self.loss_scale == 1.0 else loss.float() * self.loss_scale

    def _run(self, stage: int, index: int, part: StepCall, flow: StageFlow, received: Sequence[Tensor]) -> Any:
        repeats_per_sample = [
            tensor.view_as(tensor) for tensor in received
        ]  # of leaves autocast would keep copies, as of weights
        return self.stages.rank_module(partial(self._run_inside, stage, index, part, flow), *repeats_per_sample)

    def _run_inside(self, stage: int, index: int, part: StepCall, flow: StageFlow, *received: Tensor) -> object:
        counts = self.loss_code is None or part is self.loss_code.call
        is_end = stage == flow.num_stages - 1
        context = StepContext(
            stage=stage, microbatch=index, is_last=is_end and counts, runs_on_full_batch=self.loss_code is not None
        )
        effects = self.stages.effects

        def call() -> object:
            return part.run(self.stages.module), effects.collect(context)

        randomness = partial(self.stages.randomness.block, self.number, index)
        router = self.stages.router
        ends_in_trace, draw = self.decision.ends_in_trace, self._draw(stage, index)
        handed = self._handed(stage, part)
        context_steps = self.stages.context
        run = StageRun(
            router,
            flow,
            stage,
            received,
            randomness,
            draw,
            ends_in_trace=ends_in_trace,
            handed=handed,
            **self._crossing(flow, stage),
        )
        # After the last stage no block runs, and those of this rank get no stand-ins for what others set in them.
        kept = attributes_kept(router.blocks, flow.trace.block_side_effects if stage > self.stages.last else ())
        with effects.microbatch(context), kept:
            answer = run.run(call) if context_steps is None else context_steps.run(partial(run.run, call))
            if handed is not None and (unseen := handed.problem(part.name)) is not None:
                self.unseen.append(unseen)
            output, found = answer if is_end else (answer, effects.collect(context))
            effects.keep(context, found)
        if context.is_last:
            self.outputs[index] = tree_map_only(Tensor, Tensor.detach, output)
        return output

    def _crossing(self, flow: StageFlow, stage: int) -> dict[str, Crossing]:
        """How tensors come to a run of a stage, and how they leave it: as slices, but whole for the code after all."""
        slices, last = self.stages.context, self.stages.last
        if slices is None or stage > last:
            return {}
        sent_as = partial(slices.sent, flow.trace) if stage < last else lambda i, tensor: slices.whole(tensor)
        return {"received_as": partial(slices.received, flow.trace), "sent_as": sent_as}

    def _handed(self, stage: int, part: StepCall) -> HandedOver | None:
        """Notes the computations of a microbatch, on the last stage, where all of its step runs."""
        is_part = self.loss_code is None or part is not self.loss_code.call
        glue = self.decision.glue
        return HandedOver(glue) if glue is not None and is_part and stage >= self.stages.last else None

    def _draw(self, stage: int, index: int) -> Draw:
        if self.loss_code is None or stage < self.stages.last:
            return plain_call
        return partial(self.loss_code.draws.note, index) if stage == self.stages.last else self.loss_code.draws.repeat

    def _reports(self) -> list[StageReport]:
        merger, own = self.stages.merger, self.stages.own
        merger.averages, merger.loss_weights = self.decision.averages, self.decision.weights
        sizes = [part.size for part in self.parts]
        end = self.stages.last if self.loss_code is None else self.loss_code.stage
        stages = own if self.stages.effects.are_on_all_stages else [stage for stage in own if stage == end]
        reports = [self._report(stage, sizes, is_end=stage == end) for stage in stages]
        if self.loss_code is not None and self.stages.last in own:
            reports.append(self._report(end, [sum(sizes)], is_end=True))
        return reports

    def _report(self, stage: int, sizes: Sequence[int], *, is_end: bool) -> StageReport:
        output = None
        if is_end:
            outputs = [self.outputs[i] for i in range(len(sizes))]
            output = self.stages.merger.join(outputs, sizes, f"what {self.parts[0].name} returned")
        effects = self.stages.effects.join(stage, sizes, is_last=is_end)
        return StageReport(stage=stage, output=output, effects=effects)


def _weighted(loss: Tensor, weight: float) -> Tensor:
    if weight:
        return loss * weight
    return torch.zeros_like(loss, requires_grad=True)  # it may be no number, where no label is valid
