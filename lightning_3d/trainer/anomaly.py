"""``Trainer(detect_anomaly=True)`` over the mesh: all ranks raise one error that says where a value is not finite.

Lightning turns torch's anomaly mode on while ``fit`` trains; so does ``torch.autograd.set_detect_anomaly``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist

from lightning_3d.distributed.mesh import Mesh
from lightning_3d.errors import StepError
from lightning_3d.pipeline.anomaly import Finding, Phase, StepWatch
from lightning_3d.trace.interception import Router


@dataclass(frozen=True, kw_only=True)
class RankFinding:
    """A finding, and the rank that made it."""

    dp_rank: int
    tp_rank: int
    finding: Finding


class AnomalyDetection:
    """Watches training steps, if torch's anomaly mode is on and looks for NaNs.

    Args:
        num_stages: Of the pipeline.
        scales_losses: Whether backwards may overflow, which the loss scale answers.
    """

    def __init__(
        self, router: Router, mesh: Mesh, num_stages: int, device: torch.device, *, scales_losses: bool
    ) -> None:
        self._router, self._mesh, self._num_stages, self._device = router, mesh, num_stages, device
        self._scales_losses = scales_losses

    def new_watch(self) -> StepWatch | None:
        """A watch for the next step; None if the mode is off."""
        is_on = torch.is_anomaly_enabled() and torch.is_anomaly_check_nan_enabled()
        return StepWatch(self._router, sees_backward=not self._scales_losses) if is_on else None

    @contextmanager
    def watching(self, watch: StepWatch) -> Iterator[None]:
        """Let torch's anomaly mode note inside where forwards are called, but not raise in a backward.

        Code that fails on a value that is not finite does so on one rank: its error tells of that, too.
        """
        with torch.autograd.set_detect_anomaly(True, check_nan=False):
            try:
                yield
            except Exception as error:
                if any(finding.is_certain for finding in watch.findings):
                    error.add_note(f"Before that, {self._describe(self._take(watch))}")
                raise

    def error(self, watch: StepWatch) -> StepError | None:
        """The first thing on any rank that is certainly wrong, in words that are alike on all; every rank calls it."""
        own = self._take(watch)
        flag = torch.tensor(int(any(f.finding.is_certain for f in own)), device=self._device)
        dist.all_reduce(flag, dist.ReduceOp.MAX)
        if not flag:
            return None
        everyone: list[list[RankFinding]] = [[]] * dist.get_world_size()
        dist.all_gather_object(everyone, own)
        return StepError(self._describe([f for of_rank in everyone for f in of_rank]))

    def _take(self, watch: StepWatch) -> list[RankFinding]:
        findings = watch.findings.copy()
        watch.findings.clear()
        return [RankFinding(dp_rank=self._mesh.dp_rank, tp_rank=self._mesh.tp_rank, finding=f) for f in findings]

    def _describe(self, found: Sequence[RankFinding]) -> str:
        return describe(found, self._num_stages, self._mesh.shape.dp, self._mesh.shape.tp)


def describe(found: Sequence[RankFinding], num_stages: int, num_replicas: int, num_tp_ranks: int) -> str:
    """Tell of the first microbatch, on the first replica, in which something is certainly wrong."""
    certain = [f for f in found if f.finding.is_certain]
    microbatch, dp_rank = min((f.finding.microbatch, f.dp_rank) for f in certain)
    here = sorted(
        (f for f in found if (f.finding.microbatch, f.dp_rank) == (microbatch, dp_rank)),
        key=lambda f: (f.finding.place, f.tp_rank),
    )
    worst = next(f.finding for f in here if f.finding.is_certain)
    before = here[0].finding
    told = worst if worst.phase == Phase.BACKWARD else before
    tp_ranks = sorted({f.tp_rank for f in here if f.finding.place == told.place})
    where = [f"pipeline stage {told.stage} of {num_stages}", f"microbatch {microbatch} of {told.num_microbatches}"]
    where += [f"data-parallel rank {dp_rank} of {num_replicas}"] if num_replicas > 1 else []
    if num_tp_ranks > len(tp_ranks):
        where.append(f"tensor-parallel rank {', '.join(map(str, tp_ranks))} of {num_tp_ranks}")
    further = ""
    if told is not worst:
        what = "the loss was" if worst.phase == Phase.LOSS else f"block {worst.block} gave"
        further = f" Then {_what(worst) if worst.detail else f'{what} {worst.gave}'}."
    if told is worst and before is not worst:
        further = f" In its forward before, {_what(before)}."
    frames = "".join(["\nIts forward was called at\n", *told.frames]).rstrip() if told.frames else ""
    return (
        f"{_what(told)}: {', '.join(where)}, counted from 0.{further} Trainer(detect_anomaly=True) found it before the"
        " optimizer's step: the weights are those that made it. Look at what goes into that code there; a lower"
        f" learning rate, clipped gradients or float32 for what overflows are common cures.{frames}"
    )


def _what(finding: Finding) -> str:
    """Say a finding as a clause."""
    who = f"block {finding.block}"
    if finding.block is None:
        who = "code outside of blocks" + (f", after block {finding.after}," if finding.after is not None else "")
    if finding.detail:
        return f"the backward of {who} made nan: {finding.detail}"
    if finding.phase == Phase.LOSS:
        where = f"after the last block, {finding.after}" if finding.after is not None else "outside of blocks"
        return f"the loss is {finding.gave}, made {where}"
    if finding.gave > finding.took:
        of = f" (its parameter {finding.parameter} is not finite)" if finding.parameter is not None else ""
        return f"{who} made {finding.gave} out of {finding.took}{of}"
    return f"{who} was given {finding.took}, made outside of blocks before it, and gave {finding.gave}"
