"""One step on one batch: what a stage does with each microbatch, and what the stages tell of the outcome."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor

from lightning_3d.distributed.rng import StepRandomness
from lightning_3d.pipeline.anomaly import StepWatch
from lightning_3d.pipeline.batch_loss import Decision
from lightning_3d.pipeline.effects.effect import Place
from lightning_3d.pipeline.effects.join import Joiner
from lightning_3d.pipeline.effects.step_effects import StepEffects
from lightning_3d.pipeline.loss import check_loss
from lightning_3d.pipeline.microbatches import Microbatch, batch_size
from lightning_3d.pipeline.stage_run import Draw, StageRun, plain_call
from lightning_3d.pipeline.whole_tail import WholeTail, loss_to_come
from lightning_3d.planning.stage_flow import StageFlow
from lightning_3d.torch_internals.pytree import tree_leaves, tree_map_only
from lightning_3d.trace.interception import Router
from lightning_3d.zero.engine import RankModule


@dataclass(frozen=True, kw_only=True)
class StageReport:
    """The outcome of a step on the whole batch, as far as a stage knows it."""

    stage: int
    output: Any
    """The step's return value, joined over microbatches; None except from the last stage."""
    effects: Sequence[Any]
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
    joiner: Joiner
    randomness: StepRandomness


@dataclass(frozen=True, kw_only=True)
class PipelineStep:
    """A step of the user's module."""

    stages: Stages
    name: str
    """``"training_step"``, ``"validation_step"``, ..."""
    parts: Sequence[Microbatch]
    rest: Sequence[Any]
    """Its further arguments."""
    flows: Sequence[StageFlow]
    """Cut traces of the microbatches."""
    tail: WholeTail | None
    """The code that no block depends on, where it runs on the whole batch."""
    decision: Decision
    number: int
    """Counts the steps, for their random numbers."""
    backward: bool
    watch: StepWatch | None
    loss_scale: float
    outputs: dict[int, Any] = field(default_factory=dict)
    """Microbatch -> what the step returned for it, filled on the last stage; a tail has only one."""

    def forward(self, stage: int, index: int, received: tuple[Tensor, ...]) -> Any:
        """Run a microbatch on a stage; returns the tensors to send, or the weighted loss on the last stage."""
        part, flow, tail = self.parts[index], self.flows[index], self.tail
        if stage < self.stages.last:
            return self._run(stage, index, part, flow, received)
        if tail is None:
            return self._run(stage, index, part, flow, received, weight=self.decision.weights[index])
        sent = self._run(stage, index, part, flow, received)
        is_last = tail.take(index, sent)
        if not tail.trains:
            return self._run(tail.stage, index, part, flow, sent, weight=self.decision.weights[index])
        if is_last:
            self._run_tail(tail)
        return loss_to_come(sent, partial(tail.gradients, index)) if self.backward else ()

    def finish(self) -> None:
        """After all microbatches: run the tail on the whole batch for what it gives besides gradients."""
        if self.tail is not None and not self.tail.trains and self.stages.last in self.stages.own:
            with torch.no_grad():
                self._run_tail(self.tail)

    def _run_tail(self, tail: WholeTail) -> None:
        loss = self._run(tail.stage, 0, tail.microbatch, tail.flow, tail.received(), weight=1.0)
        if self.backward and tail.trains:
            loss.backward()
            tail.end_backward()

    def _run(
        self,
        stage: int,
        index: int,
        part: Microbatch,
        flow: StageFlow,
        received: tuple[Tensor, ...],
        *,
        weight: float | None = None,
    ) -> Any:
        """Run a stage or the tail; where that ends the step, its loss counts with a weight."""
        watched: Any = nullcontext()
        if self.watch is not None and torch.is_grad_enabled():
            watched = self.watch.microbatch(min(stage, self.stages.last), index, len(self.parts))
        with watched as watch:
            output = self.stages.rank_module(partial(self._run_stage, stage, index, part, flow), *received)
        if weight is not None:
            output = self._weighted(output, weight) if self.backward and torch.is_grad_enabled() else ()
        if watch is not None:
            if weight is not None:
                watch.see_loss(output)
            watch.see_backward(tree_leaves(output))
        if weight is not None and self.backward and self.loss_scale != 1.0 and torch.is_grad_enabled():
            return output.float() * self.loss_scale
        return output

    def _weighted(self, output: Any, weight: float) -> Tensor:
        loss = check_loss(output).reshape(())
        if weight:
            return loss * weight
        return torch.zeros_like(loss, requires_grad=True)  # it may be no number, where no label is valid

    def _run_stage(self, stage: int, index: int, part: Microbatch, flow: StageFlow, *received: Tensor) -> Any:
        counts = self.tail is None or part is self.tail.microbatch
        is_end = stage == flow.num_stages - 1
        place = Place(stage=stage, microbatch=index, is_last=is_end and counts)
        effects = self.stages.effects

        def call() -> Any:
            output = getattr(self.stages.module, self.name)(part.batch, *self.rest)
            return output, effects.collect(place)

        randomness = partial(self.stages.randomness.block, self.number, index)
        run = StageRun(self.stages.router, flow, stage, received, randomness, self._draw(stage, index))
        with effects.microbatch(place):
            answer = run.run(call)
            output, found = answer if is_end else (answer, effects.collect(place))
            effects.keep(place, found)
        if place.is_last:
            self.outputs[index] = tree_map_only(Tensor, Tensor.detach, output)
        return output

    def _draw(self, stage: int, index: int) -> Draw:
        if self.tail is None or stage < self.stages.last:
            return plain_call
        return partial(self.tail.draws.note, index) if stage == self.stages.last else self.tail.draws.repeat

    def reports(self) -> list[StageReport]:
        """The reports of this rank's stages, and of the tail.

        Raises:
            StepError: the microbatches gave what can't be joined.
        """
        if self.decision.problem is not None:
            raise self.decision.problem
        joiner, own = self.stages.joiner, self.stages.own
        joiner.averages, joiner.loss_weights = self.decision.found.averages, self.decision.weights
        sizes = [batch_size(part.batch) for part in self.parts]
        end = self.stages.last if self.tail is None else self.tail.stage
        stages = own if self.stages.effects.act_in_blocks else [stage for stage in own if stage == end]
        reports = [self._report(stage, sizes, is_end=stage == end) for stage in stages]
        if self.tail is not None and self.stages.last in own:
            reports.append(self._report(end, [sum(sizes)], is_end=True))
        return reports

    def _report(self, stage: int, sizes: Sequence[int], *, is_end: bool) -> StageReport:
        output = None
        if is_end:
            outputs = [self.outputs[i] for i in range(len(sizes))]
            output = self.stages.joiner.join(outputs, sizes, f"what {self.name} returned")
        effects = self.stages.effects.join(stage, sizes, is_last=is_end)
        return StageReport(stage=stage, output=output, effects=effects)
