"""Telling all stages what the last one found: only it runs the step to its end.

So callbacks, the progress bar and ``ModelCheckpoint(monitor=...)`` see the same on every rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from lightning_3d.errors import StepError


@dataclass(frozen=True, kw_only=True)
class StageReport:
    """The outcome of a step on the whole batch, as far as a stage knows it."""

    stage: int
    output: Any
    """The step's return value, joined over microbatches; None except from the last stage."""
    effects: Sequence[Any]
    """By effect, in order: what it did, joined over microbatches."""


def share(
    make: Callable[[], list[StageReport]],
    group: dist.ProcessGroup,
    *,
    source: int,
    device: torch.device,
    from_all: bool,
) -> list[StageReport]:
    """Send reports to all stages.

    Args:
        make: Gives those of this rank's stages.
        group: The pp axis.
        source: Global rank of the last stage.
        from_all: Whether all stages report, not only the last.

    Raises:
        StepError: on all ranks, if ``make`` raised on one that reports.
    """
    reports: list[StageReport] | StepError
    try:
        reports = make()
    except StepError as error:
        reports = error
    except Exception as error:  # the other stages wait for a report: they get this one and raise too
        reports = StepError(f"{type(error).__name__} while joining the microbatches of a batch: {error}")
        reports.__cause__ = error
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
