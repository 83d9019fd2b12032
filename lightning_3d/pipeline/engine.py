"""One step of the user's module on a pipeline: split the batch, trace, schedule, and tell all stages the outcome."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn

from lightning_3d.distributed.mesh import Mesh
from lightning_3d.distributed.rng import StepRandomness
from lightning_3d.distributed.zero import RankModule
from lightning_3d.errors import StepError
from lightning_3d.pipeline.effects.attributes import StepAttributes
from lightning_3d.pipeline.effects.join import join
from lightning_3d.pipeline.effects.metrics import metrics_of
from lightning_3d.pipeline.effects.recorder import StepRecorder
from lightning_3d.pipeline.effects.report import StepReport, make_metric_calls, replay, share
from lightning_3d.pipeline.effects.traced import TracedStepEffects
from lightning_3d.pipeline.loss import check_loss
from lightning_3d.pipeline.microbatches import Microbatch, batch_size, signature, split_batch
from lightning_3d.pipeline.schedule import Schedule, StageCall
from lightning_3d.pipeline.spans import Span, SpanRecorder
from lightning_3d.pipeline.stage_run import StageRun
from lightning_3d.planning.plan import Plan
from lightning_3d.planning.stage_flow import StageFlow, cut
from lightning_3d.torch_internals.pytree import tree_map
from lightning_3d.trace.interception import Router
from lightning_3d.trace.step_tracing import StepTracing

_MAX_CACHED = 64  # batch signatures whose flow and schedule are kept


class PipelineEngine:
    """Runs steps on one stage of a pipeline.

    Args:
        module: The user's module.
        rank_module: The root of this rank's shards, around ``module``.
        blocks: FQN -> block, routed by ``router``.
        randomness: Seeds.
    """

    def __init__(
        self,
        *,
        module: LightningModule,
        rank_module: RankModule,
        blocks: Mapping[str, nn.Module],
        router: Router,
        plan: Plan,
        mesh: Mesh,
        randomness: StepRandomness,
        device: torch.device,
    ) -> None:
        self._module, self._rank_module, self._router = module, rank_module, router
        self._plan, self._randomness, self._device = plan, randomness, device
        self._group = mesh.group("pp")
        self._stages = plan.stages_on(mesh.pp_rank)
        self._last_stage = plan.num_stages - 1
        pipeline = mesh.shape.pipelines()[mesh.shape.index_in_stage(torch.distributed.get_rank())]
        self._source = pipeline[plan.stage_ranks[-1]]
        self.recorder: SpanRecorder | None = None
        """If set, measures the steps that run."""
        self.planned: tuple[tuple[Span, ...], ...] = ()
        """The schedule of the last measured step."""
        self._metrics = metrics_of(module)
        self._attributes = StepAttributes(module, blocks.values())
        self._traced_effects = TracedStepEffects(module, blocks, router)
        self._tracing = StepTracing(module, blocks, router, self._traced_effects, device)
        self._flows: OrderedDict[Hashable, StageFlow] = OrderedDict()
        self._schedules: OrderedDict[Hashable, Schedule] = OrderedDict()

    def run(self, name: str, batch: Any, rest: Sequence[Any], *, number: int, backward: bool) -> Any:
        """Run ``module.<name>(batch, *rest)`` in microbatches on all stages.

        Args:
            name: ``"training_step"``, ``"validation_step"``, ...
            number: Counts the steps, for their random numbers.
            backward: Whether to run the backward too; gradients are left in the parameters, not reduced.

        Returns:
            What the step returns for the whole batch, the same on every stage; tensors are detached.
        """
        size = batch_size(batch)
        parts = split_batch(batch, min(self._plan.num_microbatches, size))
        # What is frozen may change while training.
        trainable = bytes(parameter.requires_grad for parameter in self._module.parameters())
        modes = (name, self._module.training, torch.is_grad_enabled(), trainable)
        keys = [(*modes, signature(part.batch)) for part in parts]
        flows = [self._flow(key, name, part, rest) for key, part in zip(keys, parts, strict=True)]
        schedule = self._schedule((backward, *keys), flows, backward=backward)
        recorder = StepRecorder(self._module, self._metrics, self._router)
        outputs: dict[int, Any] = {}

        def forward(stage: int, index: int, received: tuple[Tensor, ...]) -> Any:
            is_last = stage == self._last_stage

            def step() -> Any:
                output = getattr(self._module, name)(parts[index].batch, *rest)
                return output, recorder.noted(stage, index), self._attributes.tensors()

            def run_stage(*tensors: Tensor) -> Any:
                self._randomness.seed_glue(number, index)
                run = StageRun(
                    self._router, flows[index], stage, tensors, partial(self._randomness.block, number, index)
                )
                hooks = self._traced_effects.hooks.put_back(is_trace=False)
                with hooks, self._attributes.microbatch(), recorder.microbatch(stage, index, keeps_glue=is_last):
                    answer = run.run(step)
                    if not is_last:
                        recorder.settle(stage, index, recorder.noted(stage, index))
                        return answer
                    output, noted, attributes = answer
                    recorder.settle(stage, index, noted)
                    self._attributes.keep(index, attributes)
                    return output

            output = self._rank_module(run_stage, *received)
            if not is_last:
                return output
            outputs[index] = tree_map(lambda leaf: leaf.detach() if isinstance(leaf, Tensor) else leaf, output)
            return check_loss(output).reshape(()) * parts[index].weight if backward else ()

        with self._attributes.step():
            with self._randomness.step(), recorder.installed():
                if self.recorder is not None:
                    torch.distributed.barrier(self._group)
                    self.recorder.begin()
                    self.planned = schedule.planned()
                schedule.run(StageCall(forward=forward, recorder=self.recorder))
            sizes = [batch_size(part.batch) for part in parts]
            reports = self._shared(lambda: self._reports(name, recorder, outputs, sizes))
        replay(reports, self._module, self._metrics, self._attributes, own_stages=self._stages)
        self._traced_effects.hooks.register()
        return tree_map(lambda leaf: leaf.to(self._device) if isinstance(leaf, Tensor) else leaf, reports[-1].output)

    def _reports(
        self, name: str, recorder: StepRecorder, outputs: Mapping[int, Any], sizes: Sequence[int]
    ) -> list[StepReport]:
        """What this rank's stages have to tell."""
        reports = []
        for stage in self._stages:
            is_last = stage == self._last_stage
            if not is_last and not self._traced_effects.saw_calls_in_blocks:
                continue
            logged, calls = recorder.joined(stage, sizes)
            output = join([outputs[i] for i in range(len(sizes))], sizes, f"what {name} returned") if is_last else None
            metrics, logged = make_metric_calls(calls, logged, self._metrics)
            attributes = self._attributes.joined(sizes) if is_last else []
            reports.append(
                StepReport(stage=stage, output=output, logged=logged, metrics=metrics, attributes=attributes)
            )
        return reports

    def _shared(self, make: Callable[[], list[StepReport]]) -> list[StepReport]:
        reports: list[StepReport] | StepError
        try:
            reports = make()
        except StepError as error:
            reports = error
        except Exception as error:  # the other stages wait for a report: they get this one and raise too
            reports = StepError(f"{type(error).__name__} while joining the microbatches of a batch: {error}")
            reports.__cause__ = error
        from_all = self._traced_effects.saw_calls_in_blocks
        return share(reports, self._group, self._source, self._device, from_all=from_all)

    def _flow(self, key: Hashable, name: str, part: Microbatch, rest: Sequence[Any]) -> StageFlow:
        if key not in self._flows:
            trace = self._tracing(name, part.batch, rest)
            _remember(self._flows, key, cut(trace, self._plan.stages_of_calls, self._plan.num_stages))
        self._flows.move_to_end(key)
        return self._flows[key]

    def _schedule(self, key: Hashable, flows: Sequence[StageFlow], *, backward: bool) -> Schedule:
        if key not in self._schedules:
            schedule = Schedule(
                self._plan.schedule,
                flows,
                stages=self._stages,
                stage_ranks=self._plan.stage_ranks,
                module=self._rank_module,
                device=self._device,
                group=self._group,
                backward=backward,
            )
            _remember(self._schedules, key, schedule)
        self._schedules.move_to_end(key)
        return self._schedules[key]


def _remember(cache: OrderedDict[Hashable, Any], key: Hashable, value: Any) -> None:
    cache[key] = value
    if len(cache) > _MAX_CACHED:
        cache.popitem(last=False)
