"""One step of the user's module on a pipeline: split the batch, trace, schedule, and tell all stages the outcome.

Only the last stage runs the step to its end. Callbacks, the progress bar and ``ModelCheckpoint(monitor=...)`` see the
same on every rank.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from torch import Tensor

from lightning_3d.distributed.mesh import Mesh
from lightning_3d.distributed.rng import StepRandomness
from lightning_3d.errors import StepError
from lightning_3d.pipeline.anomaly import StepWatch
from lightning_3d.pipeline.effects.effect import Place
from lightning_3d.pipeline.effects.join import Joiner
from lightning_3d.pipeline.effects.step_effects import RandomNumbers, StepEffects
from lightning_3d.pipeline.loss import check_loss
from lightning_3d.pipeline.microbatches import Microbatch, batch_size, signature, split_batch
from lightning_3d.pipeline.schedule import AroundBackward, Schedule
from lightning_3d.pipeline.spans import Span, SpanRecorder, Timeline
from lightning_3d.pipeline.stage_run import StageRun
from lightning_3d.pipeline.study import Study
from lightning_3d.pipeline.whole_tail import WholeTail, loss_to_come
from lightning_3d.planning.plan import Plan
from lightning_3d.planning.stage_flow import StageFlow, cut
from lightning_3d.planning.stage_gradients import check_gradients
from lightning_3d.torch_internals.pytree import tree_leaves, tree_map_only
from lightning_3d.trace.interception import Router
from lightning_3d.trace.tracer import StepTracing
from lightning_3d.zero.engine import RankModule


@dataclass(frozen=True, kw_only=True)
class StageReport:
    """The outcome of a step on the whole batch, as far as a stage knows it."""

    stage: int
    output: Any
    """The step's return value, joined over microbatches; None except from the last stage."""
    effects: Sequence[Any]
    """By effect, in order: what it did, joined over microbatches."""


def share(
    make: Callable[[], list[StageReport]],
    group: dist.ProcessGroup,
    *,
    source: int,
    device: torch.device,
    from_all: bool,
) -> list[StageReport]:
    """Send reports to all stages.

    Args:
        make: Gives those of this rank's stages.
        group: The pp axis.
        source: Global rank of the last stage.
        from_all: Whether all stages report, not only the last.

    Raises:
        StepError: on all ranks, if ``make`` raised on one that reports.
    """
    reports: list[StageReport] | StepError
    try:
        reports = make()
    except StepError as error:
        reports = error
    except Exception as error:  # the other stages wait for a report: they get this one and raise too
        reports = StepError(f"{type(error).__name__} while joining the microbatches of a batch: {error}")
        reports.__cause__ = error
    gathered: list[Any] = [reports]
    if from_all:
        gathered = [None] * dist.get_world_size(group)
        dist.all_gather_object(gathered, reports, group=group)
    else:
        dist.broadcast_object_list(gathered, src=source, group=group, device=device)
    for answer in gathered:
        if isinstance(answer, StepError):
            raise answer
    return sorted((report for answer in gathered for report in answer), key=lambda report: report.stage)


T = TypeVar("T")

_MAX_CACHED = 64  # batch signatures whose flow and schedule are kept


@dataclass(frozen=True, kw_only=True)
class _Step:
    """One step on one batch."""

    name: str
    parts: Sequence[Microbatch]
    rest: Sequence[Any]
    flows: Sequence[StageFlow]
    tail: WholeTail | None
    number: int
    backward: bool
    watch: StepWatch | None
    loss_scale: float
    outputs: dict[int, Any] = field(default_factory=dict)
    """Microbatch -> what the step returned for it, filled on the last stage; a tail has only one."""


class PipelineEngine:
    """Runs steps on one stage of a pipeline.

    Args:
        rank_module: The root of this rank's shards, around ``module``.
        around_backward: Gives the context of each backward of a microbatch on a stage.
    """

    def __init__(
        self,
        *,
        module: LightningModule,
        rank_module: RankModule,
        router: Router,
        plan: Plan,
        mesh: Mesh,
        randomness: StepRandomness,
        device: torch.device,
        around_backward: AroundBackward,
    ) -> None:
        self._module, self._rank_module, self._router = module, rank_module, router
        self._around_backward = around_backward
        self._plan, self._randomness, self._device = plan, randomness, device
        self._group = mesh.group("pp")
        self._stages = plan.stages_on(mesh.pp_rank)
        self._last_stage = plan.num_stages - 1
        pipeline = mesh.shape.pipelines()[mesh.shape.index_in_stage(torch.distributed.get_rank())]
        self._source = pipeline[plan.stage_ranks[-1]]
        self._recorder: SpanRecorder | None = None  # measures the steps that run
        self._planned: tuple[tuple[Span, ...], ...] = ()  # the schedule of the last measured step
        self._joiner = Joiner()
        self._effects = StepEffects(module, router, RandomNumbers(randomness), joiner=self._joiner)
        self._tracing = StepTracing(module, router, self._effects, device)
        self._study = Study(module, router, self._joiner, device)
        self._flows: OrderedDict[Hashable, StageFlow] = OrderedDict()
        self._schedules: OrderedDict[Hashable, Schedule] = OrderedDict()

    def run(
        self,
        name: str,
        batch: Any,
        rest: Sequence[Any],
        *,
        number: int,
        backward: bool,
        loss_scale: float = 1.0,
        watch: StepWatch | None = None,
        computed: Callable[[], None] = lambda: None,
    ) -> Any:
        """Run ``module.<name>(batch, *rest)`` in microbatches on all stages.

        Args:
            name: ``"training_step"``, ``"validation_step"``, ...
            number: Counts the steps, for their random numbers.
            backward: Whether to run the backward too; gradients are left in the parameters, not reduced.
            loss_scale: The factor of losses in the backward, and so of gradients.
            watch: Watches the step.
            computed: Called when all microbatches are computed on this rank; if it raises, it has to do so on all.

        Returns:
            What the step returns for the whole batch, the same on every stage; tensors are detached.
        """
        parts = split_batch(batch, min(self._plan.num_microbatches, batch_size(batch)))
        # What is frozen may change while training.
        trainable = bytes(parameter.requires_grad for parameter in self._module.parameters())
        modes = (name, self._module.training, torch.is_grad_enabled(), trainable)
        keys = [(*modes, signature(part.batch)) for part in parts]
        flows = [self._flow(key, name, part.batch, rest) for key, part in zip(keys, parts, strict=True)]
        tail = None
        if self._plan.loss == "whole":
            tail = WholeTail(parts, flows, batch, self._flow((*modes, signature(batch)), name, batch, rest))
        schedule = self._schedule((backward, *keys), flows, backward=backward)
        step = _Step(
            name=name,
            parts=parts,
            rest=rest,
            flows=flows,
            tail=tail,
            number=number,
            backward=backward,
            watch=watch,
            loss_scale=loss_scale,
        )
        with self._effects.begin(number):
            if self._recorder is not None:
                torch.distributed.barrier(self._group)
                self._recorder.begin()
                self._planned = schedule.planned()
            schedule.run(partial(self._forward, step), self._around_backward, self._recorder)
        computed()
        self._joiner.evidence.study = partial(self._study.learn, name, batch, rest, size=batch_size(parts[-1].batch))
        reports = share(
            lambda: self._reports(step),
            self._group,
            source=self._source,
            device=self._device,
            from_all=self._effects.act_in_blocks,
        )
        self._joiner.evidence.study = None
        own = [min(report.stage, self._last_stage) in self._stages for report in reports]
        self._effects.apply([(report.effects, is_own) for report, is_own in zip(reports, own, strict=True)])
        return tree_map_only(Tensor, lambda leaf: leaf.to(self._device), reports[-1].output)

    def start_timeline(self) -> None:
        """Measure the steps that follow. Every rank calls it."""
        self._recorder = SpanRecorder(self._device)

    def finish_timeline(self) -> Timeline:
        """The spans measured since ``start_timeline``, of all ranks of this pipeline. Every rank calls it."""
        assert self._recorder is not None, "start_timeline comes first"
        measured: list[tuple[Span, ...]] = [()] * torch.distributed.get_world_size(self._group)
        torch.distributed.all_gather_object(measured, tuple(self._recorder.spans), group=self._group)
        self._recorder = None
        return Timeline(name=self._plan.schedule, planned=self._planned, measured=tuple(measured))

    def _forward(self, step: _Step, stage: int, index: int, received: tuple[Tensor, ...]) -> Any:
        """Run a microbatch on a stage; returns the tensors to send, or the weighted loss on the last stage."""
        part, flow, tail = step.parts[index], step.flows[index], step.tail
        if stage < self._last_stage or tail is None:
            return self._run(step, stage, index, part, flow, received)
        sent = self._run(step, stage, index, part, flow, received)
        if tail.take(index, sent):
            loss = self._run(step, tail.stage, 0, tail.microbatch, tail.flow, tail.received())
            if step.backward:
                loss.backward()
                tail.end_backward()
        return loss_to_come(sent, partial(tail.gradients, index)) if step.backward else ()

    def _run(
        self, step: _Step, stage: int, index: int, part: Microbatch, flow: StageFlow, received: tuple[Tensor, ...]
    ) -> Any:
        place = Place(stage=stage, microbatch=index, is_last=stage == flow.num_stages - 1)
        watched = nullcontext()
        if step.watch is not None:
            watched = step.watch.microbatch(min(stage, self._last_stage), index, len(step.parts))
        with watched as watch:
            output = self._rank_module(partial(self._run_stage, step, place, part, flow), *received)
        if place.is_last:
            step.outputs[index] = tree_map_only(Tensor, Tensor.detach, output)
            output = check_loss(output).reshape(()) * part.weight if step.backward else ()
        if watch is not None:
            if place.is_last:
                watch.see_loss(output)
            watch.see_backward(tree_leaves(output))
        if place.is_last and step.backward and step.loss_scale != 1.0:
            return output.float() * step.loss_scale
        return output

    def _run_stage(self, step: _Step, place: Place, part: Microbatch, flow: StageFlow, *received: Tensor) -> Any:
        def call() -> Any:
            output = getattr(self._module, step.name)(part.batch, *step.rest)
            return output, self._effects.collect(place)

        randomness = partial(self._randomness.block, step.number, place.microbatch)
        run = StageRun(self._router, flow, place.stage, received, randomness)
        with self._effects.microbatch(place):
            answer = run.run(call)
            output, found = answer if place.is_last else (answer, self._effects.collect(place))
            self._effects.keep(place, found)
        return output

    def _reports(self, step: _Step) -> list[StageReport]:
        """The reports of this rank's stages, and of the tail."""
        sizes = [batch_size(part.batch) for part in step.parts]
        end = self._last_stage if step.tail is None else step.tail.stage
        stages = self._stages if self._effects.act_in_blocks else [stage for stage in self._stages if stage == end]
        reports = [self._report(step, stage, sizes, is_end=stage == end) for stage in stages]
        if step.tail is not None and self._last_stage in self._stages:
            reports.append(self._report(step, end, [sum(sizes)], is_end=True))
        return reports

    def _report(self, step: _Step, stage: int, sizes: Sequence[int], *, is_end: bool) -> StageReport:
        output = None
        if is_end:
            outputs = [step.outputs[i] for i in range(len(sizes))]
            output = self._joiner.join(outputs, sizes, f"what {step.name} returned")
        return StageReport(stage=stage, output=output, effects=self._effects.join(stage, sizes, is_last=is_end))

    def _flow(self, key: Hashable, name: str, batch: Any, rest: Sequence[Any]) -> StageFlow:
        def traced() -> StageFlow:
            trace, plan = self._tracing(name, batch, rest), self._plan
            flow = cut(trace, plan.stages_of_calls, plan.num_stages, with_tail=plan.loss == "whole")
            check_gradients(flow)
            return flow

        return _cached(self._flows, key, traced)

    def _schedule(self, key: Hashable, flows: Sequence[StageFlow], *, backward: bool) -> Schedule:
        make = partial(
            Schedule,
            self._plan.schedule,
            flows,
            stages=self._stages,
            stage_ranks=self._plan.stage_ranks,
            module=self._rank_module,
            device=self._device,
            group=self._group,
            backward=backward,
            forwards_first=self._plan.loss == "whole",
        )
        return _cached(self._schedules, key, make)


def _cached(cache: OrderedDict[Hashable, T], key: Hashable, make: Callable[[], T]) -> T:
    """The value for this key, made if it is not among those used last."""
    if key not in cache:
        cache[key] = make()
        if len(cache) > _MAX_CACHED:
            cache.popitem(last=False)
    cache.move_to_end(key)
    return cache[key]
