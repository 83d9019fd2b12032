"""One step of the user's module on a pipeline: split the batch, trace, schedule, and tell all stages the outcome.

Only the last stage runs the step to its end. Callbacks, the progress bar and ``ModelCheckpoint(monitor=...)`` see the
same on every rank.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Hashable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from torch import Tensor

from lightning_3d.context.steps import ContextSteps
from lightning_3d.distributed.agreement import gather_numbers, raise_on_all_ranks
from lightning_3d.distributed.mesh import Mesh
from lightning_3d.distributed.objects import all_gather_objects, broadcast_object
from lightning_3d.distributed.rng import StepRandomness
from lightning_3d.pipeline.attempt import Failure, StepFailed, agree
from lightning_3d.pipeline.batch_loss import BatchLoss, LossReduction
from lightning_3d.pipeline.effects.merge import Merger
from lightning_3d.pipeline.effects.norms import Norms
from lightning_3d.pipeline.effects.step_effects import RandomNumbers, StepEffects
from lightning_3d.pipeline.glue_seen import UnseenError
from lightning_3d.pipeline.loss_kind import LossKind
from lightning_3d.pipeline.loss_study import LossStudy
from lightning_3d.pipeline.microbatches import batch_size, split_batch
from lightning_3d.pipeline.schedule import AroundBackward, Schedule
from lightning_3d.pipeline.spans import SpanRecorder
from lightning_3d.pipeline.step import PipelineStep, StageReport, Stages
from lightning_3d.pipeline.traced_alike import check_alike
from lightning_3d.pipeline.traces import StepCall, Traces, cached
from lightning_3d.pipeline.undo import BlocksBefore
from lightning_3d.pipeline.whole_loss_code import WholeLossCode
from lightning_3d.planning.plan import Plan
from lightning_3d.planning.stage_flow import StageFlow, cut
from lightning_3d.tensor.vocabulary.fused_heads import is_head
from lightning_3d.torch_internals.autocast import autocast_cache
from lightning_3d.torch_internals.pytree import tree_map_only
from lightning_3d.trace.interception import Router
from lightning_3d.trace.step_tracing import StepTracing
from lightning_3d.trace.trace import Trace
from lightning_3d.waits import long_wait
from lightning_3d.zero.engine import RankModule

_MAX_SCHEDULES = 2
"""Schedules are made in little time, and each holds memory for what it receives: one of training, one of evaluation."""


def share(
    reports: list[StageReport],
    group: dist.ProcessGroup,
    *,
    source: int,
    device: torch.device,
    from_all: bool,
) -> list[StageReport]:
    """Send reports to all stages.

    Args:
        reports: Those of this rank's stages.
        group: The pp axis.
        source: Global rank of the last stage.
        from_all: Whether all stages report, not only the last.
    """
    if from_all:
        gathered = all_gather_objects(reports, device, group=group)
    else:
        gathered = [broadcast_object(reports, device, src=source, group=group)]
    return sorted((report for of_rank in gathered for report in of_rank), key=lambda report: report.stage)


class PipelineEngine:
    """Runs steps on one stage of a pipeline.

    Args:
        rank_module: The root of this rank's shards, around ``module``.
        around_backward: Gives the context of each backward of a microbatch on a stage.
        full_backward_stages: Stages whose backward stays in one piece where the schedule splits it.
        has_budget: Whether a step's memory is predicted for the loss that the plan names.
        sit_out: As of ``Stages``.
        context: As of ``Stages``.
        shares_evaluations: Whether the replicas evaluate together, as those do that share weights.
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
        full_backward_stages: Collection[int] = (),
        has_budget: bool = False,
        sit_out: Callable[[Sequence[str]], bool],
        context: ContextSteps | None,
        shares_evaluations: bool,
    ) -> None:
        self._unsplit = full_backward_stages
        self._module, self._rank_module, self._plan, self._device = module, rank_module, plan, device
        self._around_backward = around_backward
        self._group, self._replica = mesh.group("pp"), mesh.group("replica")
        self._has_replicas, self._shares_evaluations = mesh.shape.size("samples") > 1, shares_evaluations
        pipeline = mesh.shape.pipelines()[mesh.shape.index_in_stage(torch.distributed.get_rank())]
        self._source = pipeline[plan.stage_ranks[-1]]
        self.recorder: SpanRecorder | None = None
        """Measures the steps that run, the same on all ranks; waits for others are its phase "waiting"."""
        self._merger = Merger()
        norms = Norms(module, router, [block.fqn for block in plan.blocks if len(plan.ranks_of(block)) > 1])
        self._effects = StepEffects(module, router, RandomNumbers(randomness), norms, merger=self._merger)
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
            has_budget=has_budget,
        )
        self._stages = Stages(
            own=plan.stages_on(mesh.pp_rank),
            last=plan.num_stages - 1,
            module=module,
            rank_module=rank_module,
            router=router,
            effects=self._effects,
            merger=self._merger,
            randomness=randomness,
            sit_out=sit_out,
            context=context,
        )
        self.context = context
        """As of ``Stages``."""
        self._before = BlocksBefore(block for fqn, block in router.blocks.items() if fqn not in router.absent)
        self._begun: OrderedDict[Hashable, None] = OrderedDict()  # kinds of steps that all ranks could begin
        self._last: dict[str, tuple[Sequence[StageFlow], Schedule]] = {}  # by name of the step, of one that succeeded
        self._compared: OrderedDict[Hashable, Trace] = OrderedDict()
        self._flows: OrderedDict[Hashable, StageFlow] = OrderedDict()
        self._schedules: OrderedDict[Hashable, Schedule] = OrderedDict()

    def run(
        self,
        name: str,
        batch: object,
        rest: Sequence[object],
        *,
        number: int,
        backward: bool,
        loss_scale: float = 1.0,
    ) -> object:
        """Run ``module.<name>(batch, *rest)`` in microbatches on all stages.

        Args:
            name: ``"training_step"``, ``"validation_step"``, ...
            number: Counts the steps, for their random numbers.
            backward: Whether to run the backward too; gradients are left in the parameters, not reduced.
            loss_scale: The factor of losses in the backward, and so of gradients.

        Returns:
            What the step returns for the whole batch, the same on every stage; tensors are detached.

        Raises:
            StepFailed: on all ranks, where one can't run it so.
        """
        everyone = None if backward or self._shares_evaluations else self._replica
        self._before.keep()
        settings = {"number": number, "backward": backward, "loss_scale": loss_scale}
        step, schedule = self._begin(name, batch, rest, everyone, **settings)
        with self._effects.begin(number):
            if schedule is not None:
                with autocast_cache(enabled=backward), self._measured(schedule):  # all microbatches read the same casts
                    schedule.run(step.forward, self._around_backward, step.fail_backward, self.recorder)
            reports = step.finish()
            self._agree(step, everyone)
        assert schedule is not None
        if self.context is not None and not self._last:
            self._refuse_without_sequence(self.context)
        self._last[name] = step.flows, schedule
        return self._apply(reports)

    def _refuse_without_sequence(self, context: ContextSteps) -> None:
        """After the first step.

        Raises:
            PlanError: on all ranks, where no stage has got a sequence.
        """
        if not any(gather_numbers(context.has_sequence, group=self._group)):
            raise context.no_sequence()

    def studies_again(self, failed: StepFailed) -> bool:
        """Whether a step that failed is to run again: it did otherwise than those that were studied, and is studied."""
        return failed.is_undone and isinstance(failed.error, UnseenError) and self._batch_loss.doubts()

    def _agree(self, step: PipelineStep, everyone: dist.ProcessGroup | None) -> None:
        """Go on where all ranks can; else leave nothing of the step.

        Raises:
            StepFailed: on all ranks.
        """
        failed = agree(step.failure, can_undo=self._before.can_undo, group=everyone)
        if failed is not None:
            self._effects.undo()
            if failed.is_undone:
                self._before.undo()
        self._before.forget()
        if failed is not None:
            raise failed

    def _apply(self, reports: list[StageReport]) -> object:
        """Do on all stages what the step did, and return what it returned."""
        reports = share(
            reports,
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
        with self.recorder.during("waiting"):
            dist.barrier(self._group)
            self.recorder.begin(schedule.planned())
            yield
            dist.barrier(self._group)

    def _begin(
        self, name: str, batch: object, rest: Sequence[object], everyone: dist.ProcessGroup | None, **settings: Any
    ) -> tuple[PipelineStep, Schedule | None]:
        """The step and its schedule; where this replica can't begin it, a step that has failed.

        The others may run theirs meanwhile, so it takes part in their collectives by a schedule that ran before.
        """
        first = nullcontext() if name in self._last else raise_on_all_ranks(everyone)  # so there is one
        try:
            with first:
                return self._split(name, batch, rest, **settings)
        except Exception as error:
            flows, schedule = self._last.get(name, ((), None)) if self._has_replicas else ((), None)
            decision = LossReduction(kind=LossKind.MEAN, weights=(), joins_values=True)
            step = PipelineStep(
                stages=self._stages, parts=(), flows=flows, loss_code=None, decision=decision, **settings
            )
            step.fail(Failure(error=error))
            return step, schedule

    def _split(
        self, name: str, batch: object, rest: Sequence[object], *, backward: bool, **settings: Any
    ) -> tuple[PipelineStep, Schedule]:
        """Split the batch, and decide how the step is made of its microbatches; alike on all ranks of the replica."""
        planned = self._plan.num_microbatches
        parts = split_batch(batch, planned if planned == 1 else min(planned, batch_size(batch)))
        shares = [part.weight for part in parts]
        whole, *calls = self._traces.calls(name, [batch, *(part.batch for part in parts)], rest)
        kinds = backward, *(call.kind for call in (whole, *calls))
        with nullcontext() if kinds in self._begun else raise_on_all_ranks(self._replica):
            step = self._decided(whole, calls, shares, backward=backward, **settings)
            schedule = self._schedule(step)
        cached(self._begun, kinds, lambda: None)
        return step, schedule

    def _decided(
        self, whole: StepCall, calls: Sequence[StepCall], shares: Sequence[float], *, backward: bool, **settings: Any
    ) -> PipelineStep:
        for call in calls:
            self._trace(call)
        decision = self._batch_loss.decide(whole, calls, shares, trains=backward)
        with_tail = not decision.joins_values
        flows = [self._flow(call, with_tail=with_tail) for call in calls]
        loss_code = None
        if with_tail:
            loss_code = WholeLossCode(
                whole,
                self._flow(whole, with_tail=True),
                flows,
                shares,
                repeats_per_sample=decision.repeats_per_sample,
                trains=decision.kind == LossKind.WHOLE or not backward,
            )
        return PipelineStep(
            stages=self._stages,
            parts=calls,
            flows=flows,
            loss_code=loss_code,
            decision=decision,
            backward=backward,
            **settings,
        )

    def losses(self) -> tuple[str, ...]:
        """Lines for the plan: how losses come from microbatches, as steps have shown."""
        return self._batch_loss.texts

    def _trace(self, call: StepCall) -> Trace:
        """The trace of a step; every rank of the pipeline makes it, and raises what it is on one of them."""

        def traced() -> Trace:
            with long_wait(f"Tracing {call.name}"), raise_on_all_ranks(self._group):
                trace = self._traces.trace(call)
                trace.refuse_what_counts_once()
            check_alike(trace, call.name, self._group)
            return trace

        return cached(self._compared, call.kind, traced)

    def _flow(self, call: StepCall, *, with_tail: bool) -> StageFlow:
        def cut_anew() -> StageFlow:
            stages = self._plan.stages_of_calls
            return cut(self._trace(call), stages, self._plan.num_stages, with_tail=with_tail, heads=call.heads)

        return cached(self._flows, (with_tail, call.kind), cut_anew)

    def _schedule(self, step: PipelineStep) -> Schedule:
        forwards_first = step.loss_code is not None and step.loss_code.trains
        make = partial(
            Schedule,
            self._plan.schedule,
            step.flows,
            stages=self._stages.own,
            stage_ranks=self._plan.stage_ranks,
            module=self._rank_module,
            device=self._device,
            group=self._group,
            crossing=self._stages.crossing,
            backward=step.backward,
            forwards_first=forwards_first,
            full_backward_stages=self._unsplit,
        )
        kinds = tuple(part.kind for part in step.parts)
        key = (step.backward, step.loss_code is None, forwards_first, kinds)
        return cached(self._schedules, key, make, most=_MAX_SCHEDULES)
