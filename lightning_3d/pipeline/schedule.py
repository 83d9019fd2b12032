"""The adapter to torch.distributed.pipelining: the only file that touches its stages and schedules.

Its internals move from release to release; this was written for and tested with torch 2.13. Every microbatch reaches
every stage by its index (non-tensor keyword arguments are handed to all stages as they are), and the shapes that cross
are static, since the trace knows them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.distributed.pipelining._utils import TensorMeta as _TorchMeta
from torch.distributed.pipelining._utils import _derive_grad_metas, extract_tensor_metas

from lightning_3d.pipeline.stages import StageFlow

_SCHEDULES = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}


@dataclass(frozen=True, kw_only=True)
class StageCall:
    """How a schedule runs one microbatch on this rank's stage."""

    forward: Callable[[int, tuple[Tensor, ...]], Any]
    """(index of the microbatch, received tensors) -> tensors to send, or the weighted loss on the last stage."""


class Schedule:
    """Runs the microbatches of one step through this rank's stage.

    Args:
        name: ``"gpipe"`` or ``"1f1b"``.
        flows: The traced flow of each microbatch; their shapes may differ.
        stage: Index of this rank's stage.
        module: The stage's parameters.
        group: Process group of the pp axis.
        backward: Whether to run the backward too.
    """

    def __init__(
        self,
        name: str,
        flows: Sequence[StageFlow],
        *,
        stage: int,
        module: nn.Module,
        device: torch.device,
        group: dist.ProcessGroup,
        backward: bool,
    ) -> None:
        num_stages, num_microbatches = flows[0].num_stages, len(flows)
        if not backward or num_microbatches < num_stages:  # 1F1B needs as many microbatches as stages
            name = "gpipe"
        torch_stage = _Stage(_StageModule(module), flows, stage, device, group)
        self._schedule = _SCHEDULES[name](
            torch_stage,
            num_microbatches,
            loss_fn=(lambda output, target: output) if backward else None,
            scale_grads=False,
        )
        self._indices = torch.arange(num_microbatches)

    def run(self, call: StageCall) -> None:
        """Run all microbatches, forward and backward.

        Raises:
            BaseException: what ``call`` or the backward raised, without torch's words around it.
        """
        failure = None
        try:
            self._schedule.step(index=self._indices, call=call, target=self._indices, return_outputs=False)
        except RuntimeError as error:  # torch wraps what a stage raises and prints its arguments
            if error.__cause__ is None:
                raise
            failure = error.__cause__
        if failure is not None:
            raise failure


class _StageModule(nn.Module):
    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *received: Tensor, index: Tensor, call: StageCall) -> Any:
        return call.forward(int(index), received)


class _Stage(PipelineStage):
    """A stage whose microbatches may have different shapes."""

    def __init__(
        self,
        module: nn.Module,
        flows: Sequence[StageFlow],
        stage: int,
        device: torch.device,
        group: dist.ProcessGroup,
    ) -> None:
        inputs = [_examples(flow, flow.received(stage)) for flow in flows]
        outputs = [_examples(flow, flow.sent(stage)) for flow in flows]
        if stage == flows[0].num_stages - 1:  # it returns the loss, or nothing
            outputs = [(torch.empty((), device="meta", requires_grad=True),) for _ in flows]
        super().__init__(
            module, stage, flows[0].num_stages, device, input_args=inputs[0], output_args=outputs[0], group=group
        )
        self._inputs = [_metas(examples) for examples in inputs]
        self._outputs = [_metas(examples) for examples in outputs]

    def _setup_forward_recv_info(self, num_microbatches: int, has_backward: bool) -> None:
        received = {}
        for index in range(num_microbatches):
            self._stage_meta.inputs = self._inputs[index]
            super()._setup_forward_recv_info(1, has_backward)
            received[index] = self.args_recv_info[0]
        self._stage_meta.inputs = self._inputs[0]
        self.args_recv_info = received

    def _setup_backward_recv_info(self, num_microbatches: int) -> None:
        received = {}
        for index in range(num_microbatches):
            self._stage_meta.output_grads = _gradients(self._outputs[index])
            super()._setup_backward_recv_info(1)
            received[index] = self.grad_recv_info[0]
        self.chunks = num_microbatches
        self.grad_recv_info = received

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        if self.has_backward and not self.is_first:  # what this stage did not use has gradient zero
            pairs = zip(self.bwd_cache[bwd_chunk_id], self._inputs[bwd_chunk_id], strict=True)
            self.bwd_cache[bwd_chunk_id] = tuple(self._sendable(gradient, meta) for gradient, meta in pairs)
        operations: list[dist.P2POp] = super().get_bwd_send_ops(bwd_chunk_id)
        return operations

    def _sendable(self, gradient: Tensor | None, meta: _TorchMeta) -> Tensor | None:
        if gradient is not None:
            return gradient.contiguous()
        return torch.zeros(meta.shape, dtype=meta.dtype, device=self.device) if meta.requires_grad else None


def _examples(flow: StageFlow, ids: tuple[int, ...]) -> tuple[Tensor, ...]:
    return tuple(
        torch.empty(meta.shape, dtype=meta.dtype, device="meta", requires_grad=meta.requires_grad)
        for meta in flow.metas(ids)
    )


def _metas(examples: tuple[Tensor, ...]) -> tuple[_TorchMeta, ...]:
    metas = extract_tensor_metas(examples)
    assert metas is not None
    return metas


def _gradients(metas: tuple[_TorchMeta, ...]) -> tuple[_TorchMeta | None, ...]:
    gradients: tuple[_TorchMeta | None, ...] = _derive_grad_metas(metas)
    return gradients
