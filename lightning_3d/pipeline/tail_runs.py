"""Running the code after the blocks alone, on what blocks might have given."""

from __future__ import annotations

import inspect
from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from torch import Tensor
from typing_extensions import override

from lightning_3d.errors import StepError
from lightning_3d.model.block_runner import Call
from lightning_3d.pipeline.effects.effect import Place
from lightning_3d.pipeline.effects.step_effects import StepEffects
from lightning_3d.pipeline.loss import check_loss
from lightning_3d.pipeline.stage_run import Draw, StageRun
from lightning_3d.pipeline.traces import StepCall, Traces, cached
from lightning_3d.planning.stage_flow import StageFlow, cut
from lightning_3d.planning.stage_gradients import check_gradients
from lightning_3d.trace.ghost import Ghost
from lightning_3d.trace.interception import Router
from lightning_3d.trace.side_outputs import attributes_kept
from lightning_3d.trace.trace import Trace, TracedCall
from lightning_3d.zero.engine import RankModule

TAIL = 1
"""The stage of the code after the blocks, where all blocks are on one before it."""


@dataclass(frozen=True, kw_only=True)
class TailRun:
    """A run of the code after the blocks."""

    output: Any
    """The step's return value."""
    denominators: Sequence[float] | None
    """By what data of the batch the loss may have been divided; None if that can't be seen."""
    loss: Tensor | None
    of_received: Sequence[Tensor | None]
    """Gradients of what it got from blocks."""
    of_parameters: Sequence[Tensor | None]
    """Gradients of the parameters that this rank holds."""


class TailRuns:
    """Runs steps of a module without its blocks.

    Args:
        effects: Take what the steps do beside their loss.
    """

    def __init__(
        self,
        module: LightningModule,
        rank_module: RankModule,
        router: Router,
        effects: StepEffects,
        traces: Traces,
    ) -> None:
        self._module, self._rank_module, self._router, self._effects = module, rank_module, router, effects
        self._traces = traces
        self._flows: OrderedDict[Hashable, StageFlow] = OrderedDict()

    def flow(self, call: StepCall) -> StageFlow:
        """The trace of a call, cut before the code after the blocks.

        Raises:
            StepError: that code draws random numbers.
            TraceError: it differentiates what the blocks do, or changes in place what they gave.
        """
        return cached(self._flows, call.kind, lambda: self._cut(self._traces.trace(call)))

    def _cut(self, trace: Trace) -> StageFlow:
        flow = cut(trace, {call.name: (0,) for call in trace.block_calls}, 1, with_tail=True)
        check_gradients(flow)
        stages = zip(trace.calls, flow.call_stages, strict=True)
        if random := next((call for call, stage in stages if stage == TAIL and call.is_random), None):
            raise StepError(f"{random.name} (called at {random.where}) draws random numbers after the blocks")
        return flow

    def run(
        self,
        call: StepCall,
        received: Sequence[Tensor],
        *,
        index: int,
        draw: Draw,
        trains: bool,
    ) -> TailRun:
        """Run it on what blocks gave.

        Args:
            index: Number of the run, for the effects.
            trains: Whether to differentiate the loss.
        """
        place, flow = Place(stage=0, microbatch=index, is_last=True), self.flow(call)
        run = _WatchedTail(self._router, flow, TAIL, received, lambda _: nullcontext(), draw)

        def step() -> Any:
            return call.run(self._module), self._effects.collect(place)

        with self._effects.microbatch(place), attributes_kept(self._router.blocks, flow.trace.sides):
            output, found = self._rank_module(partial(run.run, step))
            self._effects.keep(place, found)
        trained = [tensor for tensor in received if tensor.requires_grad] if trains else []
        parameters = [p for p in self._module.parameters() if p.requires_grad and not p.is_meta] if trains else []
        loss = check_loss(output) if trains else None
        gradients: Sequence[Tensor | None] = ()
        if loss is not None:
            gradients = torch.autograd.grad(loss, [*trained, *parameters], allow_unused=True)
        of_trained = iter(gradients)
        return TailRun(
            output=output,
            denominators=None if flow.trace.stopped_by is not None else run.denominators,
            loss=None if loss is None else loss.detach(),
            of_received=[next(of_trained) if trains and tensor.requires_grad else None for tensor in received],
            of_parameters=list(of_trained),
        )

    def denominators(self, call: StepCall) -> list[float]:
        """By what data of the batch the loss may be divided: the weights of the labels in a mean of ``cross_entropy``
        or ``nll_loss``, and scalars. Nothing is computed of what blocks give.
        """
        place, flow = Place(stage=0, microbatch=0, is_last=True), self.flow(call)
        ghosts = [Ghost(meta) for meta in flow.metas(flow.received(TAIL))]
        run = _GhostTail(self._router, flow, TAIL, ghosts, lambda _: nullcontext())
        kept = attributes_kept(self._router.blocks, flow.trace.sides)
        with self._effects.microbatch(place), kept, run:
            call.run(self._module)
        return run.denominators


def _scalars_of_batch(func: Call, args: Sequence[Any]) -> list[float]:
    """By what scalars of the batch this function divides, where it divides or multiplies."""
    name = func.__name__.strip("_").removeprefix("i").removeprefix("r")
    if name not in ("div", "truediv", "true_divide", "divide", "mul", "multiply"):
        return []
    scalars = [leaf for leaf in args if isinstance(leaf, Tensor) and leaf.ndim == 0 and not leaf.requires_grad]
    of_batch = [leaf.item() for leaf in scalars if not isinstance(leaf, Ghost)]
    if name in ("mul", "multiply"):
        return [1 / scalar if scalar else 0.0 for scalar in of_batch]
    return of_batch


def _weights_of_labels(func: Call, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[float]:
    """The sum of the weights of valid labels, of a mean over them."""
    if func not in (F.cross_entropy, F.nll_loss):
        return []
    given = inspect.signature(func).bind(*args, **kwargs)
    given.apply_defaults()
    labels, weight = given.arguments["target"], given.arguments["weight"]
    if given.arguments["reduction"] != "mean" or isinstance(labels, Ghost) or labels.is_floating_point():
        return []
    labels = labels[labels != given.arguments["ignore_index"]]
    return [float(labels.numel() if weight is None else weight[labels].sum())]


class _WatchedTail(StageRun):
    """Notes by what data of the batch the loss may be divided."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.denominators: list[float] = []

    @override
    def on_function(self, func: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        position = self._position
        answer = super().on_function(func, args, kwargs)
        if self._position > position and self._flow.call_stages[position] == TAIL:
            with torch.no_grad():
                self.denominators += _scalars_of_batch(func, args) + _weights_of_labels(func, args, kwargs)
        return answer


class _GhostTail(_WatchedTail):
    """Computes nothing of what blocks gave."""

    @override
    def _execute(self, call: TracedCall, leaves: list[Any], run: Callable[[list[Any]], Any]) -> Any:
        return self._skip(call, leaves)
