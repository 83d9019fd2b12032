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
from lightning_3d.pipeline.effects.hooks import LazyHooks
from lightning_3d.pipeline.effects.join import join
from lightning_3d.pipeline.effects.metrics import metrics_of
from lightning_3d.pipeline.effects.recorder import StepRecorder
from lightning_3d.pipeline.effects.report import StepReport, make_metric_calls, replay, share
from lightning_3d.pipeline.effects.undone import undone
from lightning_3d.pipeline.microbatches import Microbatch, batch_size, signature, split_batch
from lightning_3d.pipeline.schedule import Schedule, StageCall
from lightning_3d.pipeline.spans import Span, SpanRecorder
from lightning_3d.pipeline.stage_run import StageRun
from lightning_3d.planning.plan import Plan
from lightning_3d.planning.stage_flow import StageFlow, cut
from lightning_3d.torch_internals.pytree import tree_map
from lightning_3d.trace.interception import Router
from lightning_3d.trace.trace import Trace
from lightning_3d.trace.tracer import trace_step

_MAX_CACHED = 64  # batch signatures whose flow and schedule are kept


class Tracing:
    """Traces the steps of a module.

    Args:
        module: The user's module.
        blocks: FQN -> block, routed by ``router``.
    """

    def __init__(
        self, module: LightningModule, blocks: Mapping[str, nn.Module], router: Router, device: torch.device
    ) -> None:
        self._module, self.blocks, self._router, self._device = module, blocks, router, device
        self.saw_calls_in_blocks = False
        """Whether a block logged or updated a metric in a trace so far."""
        self.hooks = LazyHooks(module)

    def __call__(self, name: str, microbatch: Any, rest: Sequence[Any]) -> Trace:
        """Trace ``module.<name>(microbatch, *rest)``. What is logged or kept in attributes counts as returned."""

        def step() -> Any:
            recorder = StepRecorder(self._module, metrics_of(self._module), self._router)
            try:
                with recorder.installed(), recorder.microbatch(0, 0, keeps_glue=True):
                    output = getattr(self._module, name)(microbatch, *rest)
            finally:
                self.saw_calls_in_blocks |= recorder.was_called_in_blocks
            if name == "training_step":
                check_loss(output)
            return output, recorder.noted(0, 0), attributes.tensors()

        attributes = StepAttributes(self._module, self.blocks.values())

        state_kept = undone(self._module, self.blocks.values())
        with state_kept, self.hooks.put_back(is_trace=True), attributes.step(), attributes.microbatch():
            return trace_step(
                step, self._module, self.blocks, self._router, self._device, calls_all=name == "training_step"
            )


class PipelineEngine:
    """Runs steps on one stage of a pipeline.

    Args:
        module: The user's module.
        rank_module: The root of this rank's shards, around ``module``.
        router: The router of the module's blocks.
        randomness: Seeds.
    """

    def __init__(
        self,
        *,
        module: LightningModule,
        rank_module: RankModule,
        tracing: Tracing,
        router: Router,
        plan: Plan,
        mesh: Mesh,
        randomness: StepRandomness,
        device: torch.device,
    ) -> None:
        self._module, self._rank_module, self._tracing, self._router = module, rank_module, tracing, router
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
        self._attributes = StepAttributes(module, tracing.blocks.values())
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
                hooks = self._tracing.hooks.put_back(is_trace=False)
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
        self._tracing.hooks.register()
        return tree_map(lambda leaf: leaf.to(self._device) if isinstance(leaf, Tensor) else leaf, reports[-1].output)

    def _reports(
        self, name: str, recorder: StepRecorder, outputs: Mapping[int, Any], sizes: Sequence[int]
    ) -> list[StepReport]:
        """What this rank's stages have to tell."""
        reports = []
        for stage in self._stages:
            is_last = stage == self._last_stage
            if not is_last and not self._tracing.saw_calls_in_blocks:
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
        from_all = self._tracing.saw_calls_in_blocks
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


def check_loss(output: Any) -> Tensor:
    """The loss in what ``training_step`` returned, to run the backward from.

    Raises:
        StepError: there is none, or no parameter would get a gradient from it.
    """
    loss = loss_of(output)
    if not loss.requires_grad:
        raise StepError(
            "training_step returned a loss that does not require grad, so nothing would be trained. Don't detach it or"
            " compute it under torch.no_grad(), and leave at least one parameter that it depends on unfrozen."
        )
    return loss


def loss_of(output: Any) -> Tensor:
    """The loss in what ``training_step`` returned; 0-d or of one element.

    Raises:
        StepError: there is none.
    """
    loss = output.get("loss") if isinstance(output, Mapping) else output
    if not isinstance(loss, Tensor):
        raise StepError(
            f"training_step returned {type(output).__name__}, not a loss. Return a 0-d tensor, or a dict with one under"
            " 'loss'. A step can't be skipped by returning None: the ranks of the other replicas would wait for this"
            " one's gradients."
        )
    if loss.numel() != 1:
        raise StepError(f"training_step returned a loss of shape {tuple(loss.shape)}; reduce it to a 0-d tensor.")
    return loss


def _remember(cache: OrderedDict[Hashable, Any], key: Hashable, value: Any) -> None:
    cache[key] = value
    if len(cache) > _MAX_CACHED:
        cache.popitem(last=False)
