"""The schedules of torch.distributed.pipelining, run on the stages of this rank.

Every microbatch reaches every stage by its index (non-tensor keyword arguments are handed to all stages as they are),
and the shapes that cross are static, since the trace knows them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import (
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
)

from lightning_3d.pipeline.spans import SpanRecorder
from lightning_3d.planning.schedule_order import KINDS, Computation, Kind, order_1f1b, suits
from lightning_3d.planning.stage_flow import StageFlow
from lightning_3d.planning.timing import Span, play
from lightning_3d.torch_internals.pipelining import InOrder, ShapedStage, splittable
from lightning_3d.torch_internals.profiling import named
from lightning_3d.trace.ghost import TensorMeta

_SINGLE = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}
_SPLITTING = ("interleaved_zero_bubble", "zbv")
_MULTI = {
    "interleaved": ScheduleInterleaved1F1B,
    "interleaved_zero_bubble": ScheduleInterleavedZeroBubble,
    "zbv": ScheduleZBVZeroBubble,
}


Forward = Callable[[int, int, tuple[Tensor, ...]], Tensor | tuple[Tensor, ...]]
"""(stage, index of the microbatch, received tensors) -> tensors to send, or the weighted loss on the last stage."""

Crossing = Callable[[StageFlow, tuple[int, ...]], tuple[TensorMeta, ...]]
"""(flow, ids of tensors) -> what this rank sends of them from one stage to the next, and receives."""

AroundBackward = Callable[..., AbstractContextManager[None]]
"""(stage, is_last=whether it is the stage's last one in the step) -> context of the backward of a microbatch."""


Failed = Callable[[Exception, int, int], None]
"""Told of what the backward of a microbatch raised: (error, its index, stage)."""


class Schedule:
    """Runs the microbatches of one step through this rank's stages.

    Args:
        name: A schedule of ``PipelineConfig``.
        flows: The traced flow of each microbatch; their shapes may differ.
        stages: Indices of this rank's stages, ascending.
        stage_ranks: For every stage the index of its rank in ``group``.
        module: The rank's modules.
        group: Process group of the pp axis.
        crossing: Gives what this rank sends of tensors, and receives.
        backward: Whether to run the backward too.
        forwards_first: Whether no backward may begin before all forwards have run.
        full_backward_stages: Stages whose backward stays in one piece where the schedule splits it.
    """

    def __init__(
        self,
        name: str,
        flows: Sequence[StageFlow],
        *,
        stages: Sequence[int],
        stage_ranks: Sequence[int],
        module: nn.Module,
        device: torch.device,
        group: dist.ProcessGroup,
        crossing: Crossing,
        backward: bool,
        forwards_first: bool,
        full_backward_stages: Collection[int] = (),
    ) -> None:
        num_microbatches, num_ranks, num_stages = len(flows), max(stage_ranks) + 1, len(stage_ranks)
        modules = [_StageModule(module, stage, splits_backward=name in _SPLITTING) for stage in stages]
        torch_stages = [
            _Stage(
                stage_module,
                flows,
                stage,
                num_stages,
                device,
                group,
                crossing,
                is_unsplit=stage in full_backward_stages,
            )
            for stage_module, stage in zip(modules, stages, strict=True)
        ]
        loss_fn = (lambda output, target: output) if backward else None
        regular = backward and not forwards_first and suits(name, num_microbatches, num_ranks)
        if name in _SINGLE:
            make = _SINGLE[name if regular else "gpipe"]
            self._schedule: Any = make(torch_stages[0], num_microbatches, loss_fn=loss_fn, scale_grads=False)
        elif regular:
            self._schedule = _MULTI[name](list(torch_stages), num_microbatches, loss_fn=loss_fn, scale_grads=False)
        else:
            self._schedule = InOrder(torch_stages, num_microbatches, stage_ranks, loss_fn=loss_fn)
        self._indices = torch.arange(num_microbatches)
        self._stages = torch_stages

    def run(
        self,
        forward: Forward,
        around_backward: AroundBackward,
        failed: Failed,
        recorder: SpanRecorder | None = None,
    ) -> None:
        """Run all microbatches, forward and backward.

        Args:
            forward: Raises no ``Exception``.
            around_backward: Gives the context of each backward that is in one piece.
            failed: After it a backward counts as one that gave no gradients.
            recorder: Measures the computations.

        Raises:
            BaseException: what ``forward`` raised, without torch's words around it.
        """
        for stage in self._stages:
            stage.recorder, stage.around_backward, stage.failed = recorder, around_backward, failed
        failure = None
        try:
            self._schedule.step(index=self._indices, run=forward, target=self._indices, return_outputs=False)
        except RuntimeError as error:  # torch wraps what a stage raises and prints its arguments
            if error.__cause__ is None:
                raise
            failure = error.__cause__
        if failure is not None:
            raise failure

    def planned(self) -> tuple[tuple[Span, ...], ...]:
        """The schedule as it would run without communication, by rank."""
        return play(self._order())

    def _order(self) -> list[list[Computation]]:
        if isinstance(self._schedule, Schedule1F1B):  # torch 2.13 lists wrong microbatches for its last rank
            num_ranks = self._stages[0].num_stages
            return [order_1f1b(num_ranks - 1 - rank, rank, len(self._indices)) for rank in range(num_ranks)]
        order = self._schedule.pipeline_order
        return [
            [
                Computation(kind=KINDS[a.computation_type], stage=a.stage_index, microbatch=a.microbatch_index)
                for a in order[rank]
                if a is not None and a.computation_type in KINDS
            ]
            for rank in sorted(order)
        ]


class _StageModule(nn.Module):
    def __init__(self, module: nn.Module, stage: int, *, splits_backward: bool) -> None:
        super().__init__()
        self.module = module
        self._stage = stage
        self._splits_backward = splits_backward

    def forward(self, *received: Tensor, index: Tensor, run: Forward) -> Tensor | tuple[Tensor, ...]:
        output = run(self._stage, int(index), received)
        if not self._splits_backward:
            return output
        return splittable(output, received) if isinstance(output, tuple) else splittable((output,), received)[0]


class _Stage(ShapedStage):
    """A stage whose computations can be measured."""

    recorder: SpanRecorder | None = None
    around_backward: AroundBackward
    failed: Failed

    def __init__(
        self,
        module: nn.Module,
        flows: Sequence[StageFlow],
        stage: int,
        num_stages: int,
        device: torch.device,
        group: dist.ProcessGroup,
        crossing: Crossing,
        *,
        is_unsplit: bool,
    ) -> None:
        inputs = [tuple(meta.on_meta() for meta in crossing(flow, flow.received(stage))) for flow in flows]
        outputs = [tuple(meta.on_meta() for meta in crossing(flow, flow.sent(stage))) for flow in flows]
        if stage == num_stages - 1:  # it returns the loss, or nothing
            outputs = [(torch.empty((), device="meta", requires_grad=True),) for _ in flows]
        super().__init__(
            module,
            stage,
            num_stages,
            inputs=inputs,
            outputs=outputs,
            device=device,
            group=group,
            is_unsplit=is_unsplit,
        )

    def _measured(self, kind: Kind, microbatch: int) -> AbstractContextManager[object]:
        if self.recorder is None:
            return named("stage", self.stage_index, kind, microbatch)
        return self.recorder.measure(kind, self.stage_index, microbatch)

    @contextmanager
    def _backward(self, microbatch: int) -> Iterator[None]:
        """Run a backward outside of the step's autocast, as one that comes after the step is; errors say where."""
        try:
            with torch.autocast(self.device.type, enabled=False):
                yield
        except Exception as error:
            cause = error.__cause__ if isinstance(error.__cause__, Exception) else error  # see `Schedule.run`
            cause.add_note(f"In the backward of microbatch {microbatch} on pipeline stage {self.stage_index}.")
            self.failed(cause, microbatch, self.stage_index)
            self.leave_backward(microbatch)

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> object:
        with self._measured("forward", fwd_chunk_id):
            return super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)

    def backward_one_chunk(
        self, bwd_chunk_id: int, loss: object = None, full_backward: bool = True, last_backward: bool = False
    ) -> None:
        computes = self.has_backward and full_backward  # torch calls it in evaluations, too
        around = self.around_backward(self.stage_index, is_last=last_backward) if computes else nullcontext()
        backward = self._backward(bwd_chunk_id) if self.has_backward else nullcontext()
        with self._measured("backward" if full_backward else "input", bwd_chunk_id), backward, around:
            super().backward_one_chunk(bwd_chunk_id, loss, full_backward, last_backward)

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: bool = False) -> None:
        with self._measured("weight", bwd_chunk_id), self._backward(bwd_chunk_id):
            super().backward_weight_one_chunk(bwd_chunk_id, last_backward)
