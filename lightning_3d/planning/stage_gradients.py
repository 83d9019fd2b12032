"""Gradients that a step takes itself lie on one pipeline stage: what stages send has no graph behind it.

Pure: a function of the cut trace alone.
"""

from __future__ import annotations

from lightning_3d.errors import TraceError
from lightning_3d.planning.stage_flow import StageFlow
from lightning_3d.trace.gradients import TracedGradient
from lightning_3d.trace.trace import TracedCall


def check_gradients(flow: StageFlow) -> None:
    """Raise for gradients whose way leads through several stages.

    Raises:
        TraceError: ``torch.autograd.grad`` or ``backward`` in glue would pass through another stage than its own.
    """
    if flow.num_stages == 1:
        return
    made = {i: stage for call, stage in zip(flow.trace.calls, flow.call_stages, strict=True) for i in call.outputs}
    for gradient in flow.trace.gradients:
        own = max((made[i] for i in (*gradient.outputs, *gradient.inputs)), default=0)
        passed = _passed_stages(flow, gradient)
        if others := sorted(passed - {own}):
            raise refused(f"{gradient.name} (called at {gradient.where})", own, others)


def refused(call: str, stage: int, others: list[int]) -> TraceError:
    """The error for a gradient that can't be taken.

    Args:
        others: Stages through which it would lead; empty if they are not known.
    """
    through = f" also leads through the blocks of stages {others}" if others else " may lead through others"
    return TraceError(
        f"{call} differentiates tensors of blocks inside of the step. On pipeline stage {stage} its way{through}, whose"
        " graph is on other ranks. Gradient penalties and other gradients of blocks that are taken in training_step"
        " need pipeline_parallel_size=1."
    )


def _passed_stages(flow: StageFlow, gradient: TracedGradient) -> set[int]:
    """Stages of the calls between what the gradient differentiates and with respect to what."""
    after, downstream = set(gradient.inputs), []
    for call, stage in zip(flow.trace.calls, flow.call_stages, strict=True):
        if gradient.to_others or after.intersection(call.inputs) or _reads(call, gradient.parameters):
            after.update(call.outputs)
            downstream.append((call, stage))
    before, passed = set(gradient.outputs), set[int]()
    for call, stage in reversed(downstream):
        if before.intersection(call.outputs):
            before.update(call.inputs)
            passed.add(stage)
    return passed


def _reads(call: TracedCall, parameters: frozenset[str]) -> bool:
    if call.is_block:
        return any(fqn.startswith(f"{call.name}.") for fqn in parameters)
    return not parameters.isdisjoint(call.parameters)
