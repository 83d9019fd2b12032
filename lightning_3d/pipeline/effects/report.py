"""What a stage learned in a step, for the other stages: the loss, logged values, metric states, changed attributes.

Only the last stage runs the step to its end. It joins what the microbatches did to what the step on the whole batch
would have done, does it, and tells the other stages: so callbacks, the progress bar and
``ModelCheckpoint(monitor=...)`` see the same everywhere. Other stages report too if their blocks log.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from torch import Tensor, nn

from lightning_3d.errors import StepError
from lightning_3d.pipeline.effects.attributes import Change, StepAttributes
from lightning_3d.pipeline.effects.logs import ForwardValue, LogCall, MetricReference
from lightning_3d.pipeline.effects.metrics import MetricCall, MetricChanges, apply_changes, make_calls
from lightning_3d.torch_internals.pytree import tree_map


@dataclass(frozen=True, kw_only=True)
class StepReport:
    """The outcome of a step on the whole batch, as far as a stage knows it."""

    stage: int
    output: Any
    """What the step returned, joined over microbatches; None except from the last stage."""
    logged: Sequence[LogCall]
    metrics: Mapping[str, Mapping[str, Any]]
    """FQN of a metric that was updated -> its changes."""
    attributes: Sequence[Change]


def make_metric_calls(
    calls: Sequence[MetricCall], logged: Sequence[LogCall], metrics: Mapping[str, nn.Module]
) -> tuple[dict[str, dict[str, Any]], list[LogCall]]:
    """Update the metrics of this rank.

    Returns:
        The changes of the metrics, and the log calls with what metrics returned for the batch filled in.
    """
    if not calls:
        return {}, list(logged)
    changes = MetricChanges(metrics)
    answers = make_calls(calls, metrics)
    return changes.found(calls), [_filled_in(call, answers) for call in logged]


def _filled_in(call: LogCall, answers: Sequence[Any]) -> LogCall:
    if not isinstance(call.value, ForwardValue):
        return call
    answer = answers[call.value.call]
    return replace(call, value=answer if call.value.key is None else answer[call.value.key])


def share(
    reports: Sequence[StepReport] | StepError | None,
    group: dist.ProcessGroup,
    source: int,
    device: torch.device,
    *,
    from_all: bool,
) -> list[StepReport]:
    """Send reports to all stages.

    Args:
        reports: Those of this rank's stages, or what went wrong.
        source: Global rank of the last stage.
        from_all: Whether all stages report, not only the last.

    Raises:
        StepError: on all ranks, if a report is an error.
    """
    gathered: list[Any] = [reports]
    if from_all:
        gathered = [None] * dist.get_world_size(group)
        dist.all_gather_object(gathered, reports, group=group)
    else:
        dist.broadcast_object_list(gathered, src=source, group=group, device=device)
    for answer in gathered:
        if isinstance(answer, StepError):
            raise answer
    return sorted((report for answer in gathered for report in answer), key=lambda report: report.stage)


def replay(
    reports: Sequence[StepReport],
    module: LightningModule,
    metrics: Mapping[str, nn.Module],
    attributes: StepAttributes,
    *,
    own_stages: Sequence[int],
) -> None:
    """Do here what the reports say; ``own_stages`` have updated their metrics already."""

    def here(leaf: Any) -> Any:
        return leaf.to(module.device) if isinstance(leaf, Tensor) else leaf

    for report in reports:
        if report.stage not in own_stages:
            apply_changes(report.metrics, metrics, here)
        attributes.apply(report.attributes, module.device)
    for call in (call for report in reports for call in report.logged):
        value: Any = metrics[call.value.fqn] if isinstance(call.value, MetricReference) else tree_map(here, call.value)
        module.log(call.name, value, **call.arguments, batch_size=call.batch_size)
