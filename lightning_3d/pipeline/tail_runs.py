"""Running the code after the blocks alone, on what blocks might have given."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor

from lightning_3d.errors import StepError
from lightning_3d.pipeline.denominators import TAIL, GhostTail, WatchedTail, is_like_input, read
from lightning_3d.pipeline.effects.effect import Place
from lightning_3d.pipeline.effects.step_effects import StepEffects
from lightning_3d.pipeline.loss import check_loss
from lightning_3d.pipeline.stage_run import Draw
from lightning_3d.pipeline.traces import StepCall, Traces, cached
from lightning_3d.planning.stage_flow import StageFlow, cut
from lightning_3d.trace.interception import Router
from lightning_3d.trace.side_outputs import attributes_kept
from lightning_3d.zero.engine import RankModule


@dataclass(frozen=True, kw_only=True)
class TailRun:
    """A run of the code after the blocks."""

    output: Any
    """The step's return value."""
    denominators: Sequence[float]
    """By what data of the batch the loss may have been divided."""
    is_traced: bool
    """Whether no shape depended on data."""
    has_kink: bool
    """Whether a number that comes of blocks is bent at some value."""
    loss: Tensor
    of_received: Sequence[Tensor | None]
    """Gradients of what it got from blocks."""
    of_parameters: Sequence[Tensor | None]
    """Gradients of the parameters that this rank holds."""

    def without_tensors(self) -> TailRun:
        """The same, but for the loss, without what takes memory."""
        return replace(self, output=None, of_received=(), of_parameters=())


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
            TraceError: that code differentiates what the blocks do, or changes in place what they gave.
        """
        return cached(self._flows, call.kind, lambda: self._cut(call))

    def _cut(self, call: StepCall) -> StageFlow:
        trace = self._traces.trace(call)
        return cut(trace, {call.name: (0,) for call in trace.block_calls}, 1, with_tail=True, heads=call.heads)

    def check(self, call: StepCall) -> None:
        """Trace a call that is to be studied.

        Raises:
            StepError: the code after the blocks draws random numbers that nothing can stand in for.
        """
        flow = self.flow(call)
        calls = [call for call, stage in zip(flow.trace.calls, flow.call_stages, strict=True) if stage == TAIL]
        if random := next((call for call in calls if call.is_random and not is_like_input(call, flow.trace)), None):
            raise StepError(f"{random.name} (called at {random.where}) draws random numbers after the blocks")

    def run(
        self,
        call: StepCall,
        received: Sequence[Tensor],
        *,
        index: int,
        draw: Draw,
    ) -> TailRun:
        """Run it on what blocks gave, and differentiate the loss.

        Args:
            index: Number of the run, for the effects.
        """
        place, flow = Place(stage=0, microbatch=index, is_last=True, also_whole=True), self.flow(call)
        run = WatchedTail(self._router, flow, received, draw)

        def step() -> Any:
            return call.run(self._module), self._effects.collect(place)

        with self._effects.microbatch(place), attributes_kept(self._router.blocks, flow.trace.sides):
            output, found = self._rank_module(partial(run.run, step))
            self._effects.keep(place, found)
        trained = [tensor for tensor in received if tensor.requires_grad]
        parameters = [p for p in self._module.parameters() if p.requires_grad and not p.is_meta]
        loss = check_loss(output)
        with torch.autocast(loss.device.type, enabled=False):  # as the backward after a step is
            gradients = torch.autograd.grad(loss, [*trained, *parameters], allow_unused=True)
        of_trained = iter(gradients)
        return TailRun(
            output=output,
            denominators=read([run.denominators])[0],
            has_kink=run.has_kink,
            is_traced=flow.trace.stopped_by is None,
            loss=loss.detach(),
            of_received=[next(of_trained) if tensor.requires_grad else None for tensor in received],
            of_parameters=list(of_trained),
        )

    def denominators(self, call: StepCall) -> list[float | Tensor]:
        """By what data of the batch the loss may be divided, up to where the step reads what blocks give.

        Nothing is computed of that.
        """
        place, flow = Place(stage=0, microbatch=0, is_last=True, also_whole=True), self.flow(call)
        run = GhostTail(self._router, flow)
        kept = attributes_kept(self._router.blocks, flow.trace.sides)
        with suppress(Exception), self._effects.microbatch(place), kept, run:
            call.run(self._module)
        return run.denominators
