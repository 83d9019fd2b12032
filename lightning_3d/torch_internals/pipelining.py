"""torch.distributed.pipelining: stages whose microbatches differ in shape, schedules for any number of them, their end.

Its internals move from release to release.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.pipelining import (
    PipelineStage,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
)
from torch.distributed.pipelining._backward import stage_backward_weight
from torch.distributed.pipelining._utils import TensorMeta, _derive_grad_metas, extract_tensor_metas
from torch.distributed.pipelining.schedules import (
    PipelineScheduleMulti,
    _Action,
    _ComputationType,
    _PipelineScheduleRuntime,
)

from lightning_3d.torch_internals.autograd import has_reentrant_checkpoints

ComputationType = _ComputationType
"""The kind of an action of a schedule."""


_MULTI: Mapping[str, type[PipelineScheduleMulti]] = {
    "interleaved": ScheduleInterleaved1F1B,
    "interleaved_zero_bubble": ScheduleInterleavedZeroBubble,
    "zbv": ScheduleZBVZeroBubble,
}


def planned_actions(
    schedule: str, stage_ranks: Sequence[int], num_microbatches: int
) -> list[list[tuple[ComputationType, int, int]]]:
    """Kind, stage and microbatch of the actions of each rank in a schedule with several stages on a rank.

    Its constructor makes the order from a few attributes of the stages, without any of their processes.
    """
    num_ranks = max(stage_ranks) + 1
    stages: Any = [
        SimpleNamespace(
            stage_index=stage,
            num_stages=len(stage_ranks),
            group_size=num_ranks,
            group_rank=0,
            is_first=stage == 0,
            is_last=stage == len(stage_ranks) - 1,
            submod=None,
        )
        for stage, rank in enumerate(stage_ranks)
        if rank == 0
    ]
    order = _MULTI[schedule](stages, num_microbatches, loss_fn=lambda output, target: output).pipeline_order
    return [
        [
            (action.computation_type, action.stage_index, action.microbatch_index or 0)
            for action in order[rank]
            if action
        ]
        for rank in sorted(order)
    ]


class InOrder(_PipelineScheduleRuntime):
    """All forwards stage by stage, then all backwards: for any number of microbatches, and for evaluation.

    Args:
        stage_ranks: For every stage the index of its rank.
        loss_fn: None for forwards alone.
    """

    def __init__(
        self,
        stages: Sequence[PipelineStage],
        num_microbatches: int,
        stage_ranks: Sequence[int],
        loss_fn: Callable[..., Tensor] | None,
    ) -> None:
        super().__init__(list(stages), num_microbatches, loss_fn=loss_fn, scale_grads=False)  # type: ignore[no-untyped-call]  # torch 2.13
        self.pipeline_order = {}
        for rank in range(max(stage_ranks) + 1):
            own = [stage for stage, holder in enumerate(stage_ranks) if holder == rank]
            forward = [_Action(stage, _ComputationType.FORWARD, i) for stage in own for i in range(num_microbatches)]
            backward = [_Action(a.stage_index, _ComputationType.FULL_BACKWARD, a.microbatch_index) for a in forward]
            self.pipeline_order[rank] = [*forward, *reversed(backward)]
        self._prepare_schedule_with_comms(self.pipeline_order)
        if loss_fn is None:
            kept = {"FORWARD", "SEND_F", "WAIT_SEND_F", "RECV_F"}  # sends have waits since torch 2.15
            self.pipeline_order_with_comms = {
                rank: [action for action in actions if action.computation_type.name in kept]
                for rank, actions in self.pipeline_order_with_comms.items()
            }


class ShapedStage(PipelineStage):
    """A stage whose microbatches may have different shapes, all known beforehand.

    Args:
        inputs: Meta tensors that each microbatch receives.
        outputs: Meta tensors that each microbatch sends.
        is_unsplit: Whether its backward stays in one piece where others are split.
    """

    def __init__(
        self,
        module: nn.Module,
        stage: int,
        num_stages: int,
        *,
        inputs: Sequence[tuple[Tensor, ...]],
        outputs: Sequence[tuple[Tensor, ...]],
        device: torch.device,
        group: dist.ProcessGroup,
        is_unsplit: bool,
    ) -> None:
        super().__init__(module, stage, num_stages, device, input_args=inputs[0], output_args=outputs[0], group=group)
        self._inputs = [_metas(examples) for examples in inputs]
        self._outputs = [_metas(examples) for examples in outputs]
        self._is_unsplit = is_unsplit
        self._is_reentrant: bool | None = None  # found in the first backward that is to be split

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
            self._stage_meta.output_grads = _derive_grad_metas(self._outputs[index])
            super()._setup_backward_recv_info(1)
            received[index] = self.grad_recv_info[0]
        self.chunks = num_microbatches
        self.grad_recv_info = received

    def backward_maybe_with_nosync(
        self, backward_type: str, bwd_kwargs: dict[str, Any], last_backward: bool = False
    ) -> tuple[tuple[Tensor | None, ...], list[dict[str, object]] | None]:
        """Run a backward of a microbatch, in one piece where it can't be split, which leaves no weights for later.

        Torch goes through the graph for one group of weights after the other, and groups may share what is no path from
        a received tensor (a decoder's embedding and first layers); it is freed with the last of them.
        """
        if backward_type == "weight":
            weights = self.submod.parameters()
            return stage_backward_weight(weights, bwd_kwargs["param_groups"], retain_graph=True), None
        if backward_type != "input" or self._is_splittable(bwd_kwargs["stage_output"], bwd_kwargs["input_values"]):
            return super().backward_maybe_with_nosync(backward_type, bwd_kwargs, last_backward)
        if self.is_last:  # of the loss, torch takes no tuple
            bwd_kwargs = {**bwd_kwargs, "stage_output": bwd_kwargs["stage_output"][0]}
        gradients, _ = super().backward_maybe_with_nosync("full", bwd_kwargs, last_backward)
        return gradients, []

    def _is_splittable(self, outputs: Sequence[Tensor | GradientEdge | None], inputs: Sequence[object]) -> bool:
        """Whether torch can split the backward.

        It looks for weights along the paths from received tensors that require grad, and a reentrant checkpoint takes
        no gradients of inputs alone.
        """
        if self._is_unsplit or not any(isinstance(given, Tensor) and given.requires_grad for given in inputs):
            return False
        if self._is_reentrant is None:
            self._is_reentrant = has_reentrant_checkpoints(outputs)
        return not self._is_reentrant

    def leave_backward(self, index: int) -> None:
        """Let the backward of a microbatch that raised have given no gradients."""
        self.bwd_cache[index] = (None,) * len(self._inputs[index])

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        if self.has_backward and not self.is_first:  # what this stage did not use has gradient zero
            pairs = zip(self.bwd_cache[bwd_chunk_id], self._inputs[bwd_chunk_id], strict=True)
            self.bwd_cache[bwd_chunk_id] = tuple(self._sendable(gradient, meta) for gradient, meta in pairs)
        operations: list[dist.P2POp] = super().get_bwd_send_ops(bwd_chunk_id)
        return operations

    def _sendable(self, gradient: Tensor | None, meta: TensorMeta) -> Tensor | None:
        if gradient is not None:
            return gradient.contiguous()
        return torch.zeros(meta.shape, dtype=meta.dtype, device=self.device) if meta.requires_grad else None


def _metas(examples: tuple[Tensor, ...]) -> tuple[TensorMeta, ...]:
    metas = extract_tensor_metas(examples)
    assert metas is not None
    return metas


def splittable(outputs: Sequence[Tensor], received: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Outputs of a stage, or its loss, as tensors whose backward torch can split.

    It detaches them in place, which fails for views and leaves, and for a tensor that an operation of the stage saved.
    Weights whose gradients are left over it finds along the paths from received tensors alone: one node that follows
    from these and leads to all outputs lets it find every weight.
    """
    trained = [tensor for tensor in outputs if tensor.requires_grad]
    if not trained:
        return tuple(tensor.detach() for tensor in outputs)
    joined = iter(_Joined.apply(len(trained), *trained, *received))  # type: ignore[no-untyped-call]  # torch 2.13
    return tuple(next(joined) if tensor.requires_grad else tensor.detach() for tensor in outputs)


class _Joined(torch.autograd.Function):
    """Passes the first tensors on, without a copy; the others get no gradient."""

    @staticmethod
    def forward(ctx: Any, num_outputs: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.num_others = len(tensors) - num_outputs
        return tuple(tensor.detach() for tensor in tensors[:num_outputs])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        return None, *gradients, *[None] * ctx.num_others


def finish_backward(root: FSDPModule) -> None:
    """Reduce every unit's gradients and wait for them.

    FSDP2 does this from autograd hooks in the last backward; a schedule's last backward of a stage is not always the
    last of every unit. The pipeline stages of torch 2.13 call the same private functions for that reason
    (``_PipelineStageBase.perform_reduce_grad``).
    """
    state = fully_shard.state(root)  # type: ignore[attr-defined]
    state._state_ctx.manual_backward_finalization_active = False  # since torch 2.15: where no backward of a unit began
    for unit in state._state_ctx.all_states:
        for group in unit._fsdp_param_groups:
            group.post_backward()
    state._root_post_backward_final_callback()
