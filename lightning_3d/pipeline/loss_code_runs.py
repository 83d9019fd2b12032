"""Runs the loss code, which is all that follows the blocks, with random or data-less outputs of blocks.

Only values that come from the batch alone are real.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from functools import partial

import torch
from lightning.pytorch import LightningModule
from torch import Tensor
from typing_extensions import override

from lightning_3d.errors import StepError
from lightning_3d.model.block_runner import AnyCallable
from lightning_3d.pipeline.denominators import LOSS_CODE, GhostTail
from lightning_3d.pipeline.effects.effect import StepContext
from lightning_3d.pipeline.effects.step_effects import StepEffects
from lightning_3d.pipeline.glue_run import GlueRun, WholeGlueRun, undropped
from lightning_3d.pipeline.loss import check_loss
from lightning_3d.pipeline.loss_terms import LossTerms
from lightning_3d.pipeline.microbatch_concat import Draws, received_concats
from lightning_3d.pipeline.stage_run import Draw, StageRun
from lightning_3d.pipeline.traces import StepCall, Traces, cached
from lightning_3d.planning.stage_flow import StageFlow, cut
from lightning_3d.torch_internals.pytree import tree_leaves
from lightning_3d.trace.interception import Router
from lightning_3d.trace.side_outputs import attributes_kept
from lightning_3d.trace.trace import TracedCall
from lightning_3d.zero.engine import RankModule

_TIMES = frozenset({"imul", "mul", "multiply", "rmul"})
_BENDING = frozenset(
    {"abs", "clamp", "clamp_max", "clamp_min", "clip", "hardtanh", "leaky_relu", "max", "maximum", "min", "minimum"}
    | {"relu", "threshold", "where"}
)


class WatchedTail(StageRun):
    """Computes all, to be compared for microbatches and the whole batch.

    Terms with a factor of zero, which may be a weight that is still to rise, count in full. Dropout of what blocks gave
    drops nothing, so that it is the same for microbatches and the whole batch.

    Raises:
        StepError: it draws other random numbers for what blocks gave.
    """

    has_replicas = False

    def __init__(self, router: Router, flow: StageFlow, received: Sequence[Tensor], draw: Draw) -> None:
        super().__init__(router, flow, LOSS_CODE, received, lambda call: nullcontext(), draw)
        self.clamps_loss = False
        """Whether the loss is clamped, as by ``loss.clamp(max=1)``: random outputs may miss the clamp, so that shares
        of microbatches are unproved.
        """
        self.branches_on_data = False
        """Whether the loss is made after data was read, which may have decided how."""
        self.terms = LossTerms(self._value)

    @override
    def on_function(self, func: AnyCallable, args: tuple[object, ...], kwargs: dict[str, object]) -> object:
        name = getattr(func, "__name__", "").strip("_")
        of_blocks = [leaf for leaf in args if isinstance(leaf, Tensor) and leaf in self._ids]
        if name in _TIMES and of_blocks:
            args = tuple(1.0 if type(leaf) in (int, float) and leaf == 0 else leaf for leaf in args)
        self.clamps_loss |= name in _BENDING and any(leaf.ndim == 0 and leaf.requires_grad for leaf in of_blocks)
        is_past_trace = self._expected is None and self._flow.trace.stopped_by is not None
        terms = [] if kwargs else self.terms.before(name, args, of_blocks)
        answer = super().on_function(func, args, kwargs)
        if terms:
            self.terms.note(answer, terms)
        made = [leaf for leaf in tree_leaves(answer) if isinstance(leaf, Tensor)] if is_past_trace else []
        self.branches_on_data |= any(leaf.requires_grad for leaf in made)
        return answer

    @override
    def _execute(self, call: TracedCall, leaves: list[object], run: Callable[[list[object]], object]) -> object:
        return super()._execute(call, leaves, partial(self._undropped, call) if call.is_random else run)

    def _undropped(self, call: TracedCall, values: list[object]) -> Tensor:
        kept = undropped(call, self._flow.trace, values)
        if kept is None:
            raise StepError(f"{call.name} (called at {call.where}) draws random numbers after the blocks")
        return kept


@dataclass(frozen=True, kw_only=True)
class LossCodeRun:
    """A run of the code after the blocks."""

    output: object
    """The step's return value."""
    loss: Tensor
    of_received: Sequence[Tensor | None]
    """Gradients of what it got from blocks."""
    of_parameters: Sequence[Tensor | None]
    """Gradients of the parameters that this rank holds."""
    of_terms: Sequence[tuple[float, Sequence[Tensor | None]]]
    """For each term of the loss, if there are several: its factor, and the gradients of what it got from blocks."""
    clamps_loss: bool
    """As of a ``WatchedTail``."""
    branches_on_data: bool


class LossCodeRuns:
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
        self.has_drawn = False
        """Whether the code before the blocks drew random numbers of torch's when it ran last."""

    def flow(self, call: StepCall) -> StageFlow:
        """The trace of a call, cut before the code after the blocks.

        Raises:
            TraceError: that code differentiates what the blocks do, or changes in place what they gave.
        """

        def cut_anew() -> StageFlow:
            trace = self._traces.trace(call)
            return cut(trace, {call.name: (0,) for call in trace.block_calls}, 1, with_tail=True, heads=call.heads)

        return cached(self._flows, call.kind, cut_anew)

    def run(self, call: StepCall, received: Sequence[Tensor], *, index: int, draw: Draw) -> LossCodeRun:
        """Run it on what blocks gave, and differentiate the loss.

        Args:
            index: Number of the run, for the effects.
        """
        run = WatchedTail(self._router, self.flow(call), received, draw)
        output = self._run(run, call, StepContext(stage=0, microbatch=index, is_last=True, runs_on_full_batch=True))
        trained = [tensor for tensor in received if tensor.requires_grad]
        parameters = [p for p in self._module.parameters() if p.requires_grad and not p.is_meta]
        loss = check_loss(output)
        terms = run.terms.of(loss) if trained else []
        terms = terms if len(terms) > 1 else []  # one is the loss
        with torch.autocast(loss.device.type, enabled=False):  # as the backward after a step is
            of_terms = [(term.factor, term.gradients(trained)) for term in terms]
            gradients = torch.autograd.grad(loss, [*trained, *parameters], allow_unused=True)
        of_trained = iter(gradients)
        return LossCodeRun(
            output=output,
            loss=loss.detach(),
            of_received=[next(of_trained) if tensor.requires_grad else None for tensor in received],
            of_parameters=list(of_trained),
            of_terms=of_terms,
            clamps_loss=run.clamps_loss,
            branches_on_data=run.branches_on_data,
        )

    def repeats_per_sample(
        self, whole: StepCall, parts: Sequence[StepCall], shares: Sequence[float], *, seed: int = 0
    ) -> list[int]:
        """Compare the code before the tail on a batch and on its parts; returns the numbers of views in what the tail
        gets, by tensor.

        Args:
            shares: The parts' shares of the samples.
            seed: Of torch's draws.

        Raises:
            CoupledError: it couples samples.
            StepError: it draws other random numbers for parts than for the whole batch.
        """
        flow, draws, runs = self.flow(whole), Draws(shares), list[GlueRun]()
        received_concats(LOSS_CODE, flow, [self.flow(part) for part in parts], shares)
        for i, part in enumerate(parts):
            runs.append(GlueRun(self._router, self.flow(part), partial(draws.note, i), flow.trace, i))
            self._run_glue(runs[i], part, seed)
        self.has_drawn = draws.have_drawn
        run = WholeGlueRun(self._router, flow, draws.repeat, runs, shares, whole.size)
        self._run_glue(run, whole, seed)
        return run.repeats_per_sample

    def _run_glue(self, run: GlueRun, call: StepCall, seed: int) -> None:
        torch.manual_seed(seed)  # one draw for a batch, as of a factor, is then the same for all parts
        with torch.no_grad():
            self._run(run, call, StepContext(stage=0, microbatch=0, is_last=False, runs_on_full_batch=True))

    def denominators(self, call: StepCall) -> list[Tensor]:
        """By what data of the batch the loss may be divided, up to where the step reads what blocks give.

        Nothing is computed of that.
        """
        context, run = (
            StepContext(stage=0, microbatch=0, is_last=True, runs_on_full_batch=True),
            GhostTail(self._router, self.flow(call)),
        )
        with suppress(Exception), self._effects.microbatch(context), self._sides_kept(call), run:
            call.run(self._module)
        return run.denominators

    def _run(self, run: StageRun, call: StepCall, context: StepContext) -> object:
        """Run the step as ``run`` does; returns what it returned, or sends."""

        def step() -> object:
            return call.run(self._module), self._effects.collect(context)

        with self._effects.microbatch(context), self._sides_kept(call):
            answer = self._rank_module(partial(run.run, step))
            output, found = answer if context.is_last else (answer, self._effects.collect(context))
            self._effects.keep(context, found)
        return output

    def _sides_kept(self, call: StepCall) -> AbstractContextManager[None]:
        return attributes_kept(self._router.blocks, self.flow(call).trace.block_side_effects)
