"""One step of the user's module on a pipeline: split the batch, trace, schedule, and tell all stages the outcome."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from lightning_3d.errors import StepError
from lightning_3d.mesh import Mesh
from lightning_3d.pipeline.interception import Router
from lightning_3d.pipeline.microbatches import Microbatch, batch_size, signature, split_batch
from lightning_3d.pipeline.schedule import Schedule, StageCall
from lightning_3d.pipeline.side_effects import undone
from lightning_3d.pipeline.spans import Span, SpanRecorder
from lightning_3d.pipeline.stage_run import StageRun
from lightning_3d.pipeline.stages import StageFlow, cut
from lightning_3d.pipeline.step_report import (
    LogRecorder,
    StepReport,
    metric_states,
    metric_updates,
    replay,
    share,
)
from lightning_3d.pipeline.trace import Trace
from lightning_3d.pipeline.tracer import trace_step
from lightning_3d.plan import Plan
from lightning_3d.rng import StepRandomness
from lightning_3d.zero import RankModule

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
        self._module, self._blocks, self._router, self._device = module, blocks, router, device

    def __call__(self, name: str, microbatch: Any, rest: Sequence[Any]) -> Trace:
        """Trace ``module.<name>(microbatch, *rest)``. What is logged counts as returned."""
        recorder = LogRecorder(self._module)

        def step() -> Any:
            with recorder.microbatch(0):
                output = getattr(self._module, name)(microbatch, *rest)
            if name == "training_step":
                check_loss(output)
            return output, recorder.values(0)

        with undone(self._module, self._blocks.values()):
            return trace_step(
                step, self._module, self._blocks, self._router, self._device, calls_all=name == "training_step"
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
        self._plan, self._mesh, self._randomness, self._device = plan, mesh, randomness, device
        self._stages = plan.stages_on(mesh.pp_rank)
        self._last_stage = plan.num_stages - 1
        self._is_source = self._last_stage in self._stages
        pipeline = mesh.shape.pipelines()[mesh.shape.index_in_stage(torch.distributed.get_rank())]
        self._source = pipeline[plan.stage_ranks[-1]]
        self.recorder: SpanRecorder | None = None
        """If set, measures the steps that run."""
        self.planned: tuple[tuple[Span, ...], ...] = ()
        """The schedule of the last measured step."""
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
        recorder, updates = LogRecorder(self._module), metric_updates(self._module)
        outputs: dict[int, Any] = {}

        def forward(stage: int, index: int, received: tuple[Tensor, ...]) -> Any:
            def run_stage(*tensors: Tensor) -> Any:
                self._randomness.seed_glue(number, index)
                run = StageRun(
                    self._router, flows[index], stage, tensors, partial(self._randomness.block, number, index)
                )
                with recorder.microbatch(index) if stage == self._last_stage else recorder.muted():
                    return run.run(lambda: getattr(self._module, name)(parts[index].batch, *rest))

            output = self._rank_module(run_stage, *received)
            if stage != self._last_stage:
                return output
            outputs[index] = tree_map(lambda leaf: leaf.detach() if isinstance(leaf, Tensor) else leaf, output)
            return check_loss(output).reshape(()) * parts[index].weight if backward else ()

        with self._randomness.step():
            if self.recorder is not None:
                torch.distributed.barrier(self._mesh.group("pp"))
                self.recorder.begin()
                self.planned = schedule.planned()
            schedule.run(StageCall(forward=forward, recorder=self.recorder))
        report = None
        if self._is_source:
            sizes = [round(part.weight * size) for part in parts]
            report = StepReport(
                output=_join_outputs([outputs[index] for index in range(len(parts))], parts),
                logged=recorder.joined(sizes),
                metrics=metric_states(self._module, updates),
            )
        report = share(report, self._mesh.group("pp"), self._source, self._device)
        replay(report, self._module, is_source=self._is_source)
        return tree_map(lambda leaf: leaf.to(self._device) if isinstance(leaf, Tensor) else leaf, report.output)

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
                group=self._mesh.group("pp"),
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


def _join_outputs(outputs: Sequence[Any], parts: Sequence[Microbatch]) -> Any:
    """What the step would have returned for the whole batch.

    0-d floating-point tensors are averaged by samples, tensors with as many rows as samples are concatenated; of the
    rest the last microbatch's is kept.
    """
    leaves, spec = zip(*(tree_flatten(output) for output in outputs), strict=True)
    sizes = [batch_size(part.batch) for part in parts]
    return tree_unflatten([_join_leaf(list(leaf), parts, sizes) for leaf in zip(*leaves, strict=True)], spec[0])


def _join_leaf(leaves: list[Any], parts: Sequence[Microbatch], sizes: Sequence[int]) -> Any:
    if all(isinstance(leaf, Tensor) and leaf.ndim > 0 for leaf in leaves):
        if all(leaf.shape[0] == size for leaf, size in zip(leaves, sizes, strict=True)):
            return torch.cat(leaves)
        return leaves[-1]
    if all(isinstance(leaf, Tensor) and leaf.is_floating_point() for leaf in leaves):
        return torch.stack([leaf * part.weight for leaf, part in zip(leaves, parts, strict=True)]).sum()
    return leaves[-1]


def _remember(cache: OrderedDict[Hashable, Any], key: Hashable, value: Any) -> None:
    cache[key] = value
    if len(cache) > _MAX_CACHED:
        cache.popitem(last=False)
