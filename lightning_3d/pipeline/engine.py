"""One step of the user's module on a pipeline: split the batch, trace, schedule, and tell all stages the outcome.

Only the last stage runs the step to its end. Callbacks, the progress bar and ``ModelCheckpoint(monitor=...)`` see the
same on every rank.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Hashable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from torch import Tensor

from lightning_3d.distributed.agreement import gather_numbers
from lightning_3d.distributed.mesh import Mesh
from lightning_3d.distributed.objects import all_gather_objects, broadcast_object
from lightning_3d.distributed.rng import StepRandomness
from lightning_3d.errors import BatchError, StepError, ThreeDError, TraceError
from lightning_3d.pipeline.batch_loss import BatchLoss
from lightning_3d.pipeline.effects.join import Joiner
from lightning_3d.pipeline.effects.norms import Norms
from lightning_3d.pipeline.effects.step_effects import RandomNumbers, StepEffects
from lightning_3d.pipeline.loss_kind import LossKind
from lightning_3d.pipeline.loss_study import LossStudy
from lightning_3d.pipeline.microbatches import batch_size, split_batch
from lightning_3d.pipeline.schedule import AroundBackward, Schedule
from lightning_3d.pipeline.spans import SpanRecorder, Timeline
from lightning_3d.pipeline.step import PipelineStep, StageReport, Stages
from lightning_3d.pipeline.traced_alike import check_alike
from lightning_3d.pipeline.traces import StepCall, Traces, cached
from lightning_3d.pipeline.whole_tail import WholeTail
from lightning_3d.planning.inline_mode import naming_inline
from lightning_3d.planning.plan import Plan
from lightning_3d.planning.stage_flow import StageFlow, cut
from lightning_3d.planning.timing import Span
from lightning_3d.tensor.vocabulary.fused_heads import is_head
from lightning_3d.torch_internals.autocast import autocast_cache
from lightning_3d.torch_internals.pytree import tree_map_only
from lightning_3d.trace.interception import Router
from lightning_3d.trace.step_tracing import StepTracing
from lightning_3d.waits import Wait
from lightning_3d.zero.engine import RankModule

_MAX_SCHEDULES = 2
"""Schedules are made in little time, and each holds memory for what it receives: one of training, one of evaluation."""


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
        ThreeDError: on all ranks, if ``make`` raised on one that reports.
    """
    reports: list[StageReport] | ThreeDError
    try:
        reports = make()
    except ThreeDError as error:
        reports = error
    except Exception as error:  # the other stages wait for a report: they get this one and raise too
        reports = StepError(f"{type(error).__name__} while joining the microbatches of a batch: {error}")
        reports.__cause__ = error
    if from_all:
        gathered = all_gather_objects(reports, device, group=group)
    else:
        gathered = [broadcast_object(reports, device, src=source, group=group)]
    for answer in gathered:
        if isinstance(answer, ThreeDError):
            raise naming_inline(answer)
    return sorted((report for answer in gathered for report in answer), key=lambda report: report.stage)


class PipelineEngine:
    """Runs steps on one stage of a pipeline.

    Args:
        rank_module: The root of this rank's shards, around ``module``.
        around_backward: Gives the context of each backward of a microbatch on a stage.
        wait: Told when a step is traced or studied.
        unsplit: Stages whose backward stays in one piece where the schedule splits it.
        before_forward: Told which stage runs a microbatch, before it does.
        has_budget: Whether a step's memory is predicted for the loss that the plan names.
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
        wait: Wait,
        unsplit: Collection[int] = (),
        before_forward: Callable[[int], None] = lambda stage: None,
        has_budget: bool = False,
    ) -> None:
        self._unsplit = unsplit
        self._module, self._rank_module, self._plan, self._device = module, rank_module, plan, device
        self._around_backward, self._wait = around_backward, wait
        self._group = mesh.group("pp")
        pipeline = mesh.shape.pipelines()[mesh.shape.index_in_stage(torch.distributed.get_rank())]
        self._source = pipeline[plan.stage_ranks[-1]]
        self.recorder: SpanRecorder | None = None
        """Measures the steps that run, the same on all ranks; waits for others are its phase "waiting"."""
        self._planned: tuple[tuple[Span, ...], ...] = ()  # the schedule of the last measured step
        self._joiner = Joiner()
        norms = Norms(module, router, [block.fqn for block in plan.blocks if len(plan.ranks_of(block)) > 1])
        self._effects = StepEffects(module, router, RandomNumbers(randomness), norms, joiner=self._joiner)
        tracing = StepTracing(module, router, self._effects, device)
        last = (plan.num_stages - 1,)
        heads = frozenset(
            block.fqn for block in plan.blocks if block.stages == last and is_head(router.blocks[block.fqn])
        )
        self._traces = Traces(
            module, router.blocks.values(), tracing, partial(gather_numbers, group=self._group), heads
        )
        self._batch_loss = BatchLoss(
            plan.loss,
            LossStudy(module, rank_module, router, self._traces, device),
            group=self._group,
            source=self._source,
            device=device,
            wait=wait,
            has_budget=has_budget,
        )
        self._stages = Stages(
            own=plan.stages_on(mesh.pp_rank),
            last=plan.num_stages - 1,
            module=module,
            rank_module=rank_module,
            router=router,
            effects=self._effects,
            joiner=self._joiner,
            randomness=randomness,
            before_forward=before_forward,
        )
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
    ) -> Any:
        """Run ``module.<name>(batch, *rest)`` in microbatches on all stages.

        Args:
            name: ``"training_step"``, ``"validation_step"``, ...
            number: Counts the steps, for their random numbers.
            backward: Whether to run the backward too; gradients are left in the parameters, not reduced.
            loss_scale: The factor of losses in the backward, and so of gradients.

        Returns:
            What the step returns for the whole batch, the same on every stage; tensors are detached.

        Raises:
            TraceError: with ``lacks_data`` on all ranks, where stages can't follow the step, of which nothing stays.
        """
        step = self._step(name, batch, rest, number=number, backward=backward, loss_scale=loss_scale)
        schedule = self._schedule(step)
        with self._effects.begin(number):
            with autocast_cache(enabled=backward), self._measured(schedule):  # all microbatches read the same casts
                schedule.run(step.forward, self._around_backward, self.recorder)
            step.finish()
        reports = share(
            step.reports,
            self._group,
            source=self._source,
            device=self._device,
            from_all=self._effects.are_on_all_stages,
        )
        own = [min(report.stage, self._stages.last) in self._stages.own for report in reports]
        self._effects.apply([(report.effects, is_own) for report, is_own in zip(reports, own, strict=True)])
        return tree_map_only(Tensor, lambda leaf: leaf.to(self._device), reports[-1].output)

    @contextmanager
    def _measured(self, schedule: Schedule) -> Iterator[None]:
        """Around a schedule, which a recorder measures from when all ranks begin until all have ended."""
        if self.recorder is None:
            yield
            return
        self._planned = schedule.planned()
        with self.recorder.during("waiting"):
            dist.barrier(self._group)
            self.recorder.begin()
            yield
            dist.barrier(self._group)

    def _step(self, name: str, batch: Any, rest: Sequence[Any], *, backward: bool, **settings: Any) -> PipelineStep:
        """Split the batch, and decide how the step is made of its microbatches.

        Raises:
            TraceError: with ``lacks_data`` where it is an evaluation that is not made of its microbatches.
        """
        try:
            return self._split(name, batch, rest, backward=backward, **settings)
        except (BatchError, StepError, TraceError) as error:
            if backward:
                raise
            raise TraceError(str(error), lacks_data=True) from error

    def _split(self, name: str, batch: Any, rest: Sequence[Any], *, backward: bool, **settings: Any) -> PipelineStep:
        planned = self._plan.num_microbatches
        parts = split_batch(batch, planned if planned == 1 else min(planned, batch_size(batch)))
        shares = [part.weight for part in parts]
        whole, *calls = self._traces.calls(name, [batch, *(part.batch for part in parts)], rest)
        decision = self._batch_loss.decide(whole, calls, shares, trains=backward)
        with_tail = not decision.joins_values
        flows = [self._flow(call, with_tail=with_tail) for call in calls]
        tail = None
        if with_tail:
            tail = WholeTail(
                whole,
                self._flow(whole, with_tail=True),
                flows,
                shares,
                views=decision.views,
                trains=decision.kind == LossKind.WHOLE or not backward,
            )
        return PipelineStep(
            stages=self._stages,
            parts=calls,
            flows=flows,
            tail=tail,
            decision=decision,
            backward=backward,
            **settings,
        )

    def losses(self) -> tuple[str, ...]:
        """Lines for the plan: how losses come from microbatches, as steps have shown."""
        return self._batch_loss.texts

    def start_timeline(self) -> None:
        """Measure the steps that follow. Every rank calls it."""
        self.recorder = SpanRecorder(self._device)

    def finish_timeline(self) -> Timeline:
        """The spans measured since ``start_timeline``, of all ranks of this pipeline. Every rank calls it."""
        assert self.recorder is not None, "start_timeline comes first"
        measured: list[tuple[Span, ...]] = [()] * torch.distributed.get_world_size(self._group)
        torch.distributed.all_gather_object(measured, self.recorder.runs()[-1], group=self._group)
        self.recorder = None
        return Timeline(name=self._plan.schedule, planned=self._planned, measured=tuple(measured))

    def _flow(self, call: StepCall, *, with_tail: bool) -> StageFlow:
        def cut_anew() -> StageFlow:
            with self._wait(f"Tracing {call.name}"):
                trace, stages = self._traces.trace(call), self._plan.stages_of_calls
            check_alike(trace, call.name, self._group)
            trace.refuse_what_counts_once()
            return cut(trace, stages, self._plan.num_stages, with_tail=with_tail, heads=call.heads)

        return cached(self._flows, (with_tail, call.kind), cut_anew)

    def _schedule(self, step: PipelineStep) -> Schedule:
        forwards_first = step.tail is not None and step.tail.trains
        make = partial(
            Schedule,
            self._plan.schedule,
            step.flows,
            stages=self._stages.own,
            stage_ranks=self._plan.stage_ranks,
            module=self._rank_module,
            device=self._device,
            group=self._group,
            backward=step.backward,
            forwards_first=forwards_first,
            unsplit=self._unsplit,
        )
        kinds = tuple(part.kind for part in step.parts)
        key = (step.backward, step.tail is None, forwards_first, kinds)
        return cached(self._schedules, key, make, most=_MAX_SCHEDULES)
