"""Steps in microbatches that fail: all ranks learn of it, and none of them waits for one that has stopped.

[Note: steps that fail]
A stage may find in the middle of a schedule that it can't go on: the step takes another path than its trace, or the
user's code raises on a part of a batch. The others wait for its messages, and it for theirs. So it answers its further
microbatches with zeros of the shapes that the traces say, and the schedule runs to its end; what was computed by then
is dropped. After it all ranks exchange one number, whether any of them failed, before anything of the step counts:
gradients of replicas are summed over all. Those that read zeros may fail as well: the first failure is the one told.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist

from lightning_3d.distributed.agreement import portable
from lightning_3d.torch_internals.process_groups import object_device


@dataclass(frozen=True, kw_only=True)
class Failure:
    """An error that a stage ran into."""

    error: BaseException
    microbatch: int = -1
    """Its index; -1 before the first, and the number of all after the last."""
    in_backward: bool = False
    stage: int = 0

    @property
    def position(self) -> tuple[int, bool, int]:
        """Orders failures as causes."""
        return self.microbatch, self.in_backward, self.stage


class StepFailed(Exception):
    """A step in microbatches failed on some rank, and so on all of them; users never see it.

    Args:
        error: The first one.
        is_undone: Whether all is as it was before the step.
    """

    def __init__(self, error: BaseException, *, is_undone: bool) -> None:
        super().__init__(str(error))
        self.error, self.is_undone = error, is_undone


def agree(failure: Failure | None, *, can_undo: bool, group: dist.ProcessGroup | None) -> StepFailed | None:
    """Find out whether a step failed on any rank of a group; every rank of it calls it.

    Args:
        can_undo: Whether this rank can be as it was before the step.
    """
    flags = torch.tensor([failure is not None, not can_undo], dtype=torch.uint8, device=object_device(group))
    dist.all_reduce(flags, dist.ReduceOp.MAX, group)
    has_failed, is_stuck = flags.tolist()
    if not has_failed:
        return None
    own = None if failure is None else Failure(**{**vars(failure), "error": portable(failure.error)})
    everyone: list[Failure | None] = [None] * dist.get_world_size(group)
    dist.all_gather_object(everyone, own, group)
    first = min((found for found in everyone if found is not None), key=lambda found: found.position)
    is_own = failure is not None and failure.position == first.position and repr(failure.error) == repr(first.error)
    return StepFailed(failure.error if is_own and failure else first.error, is_undone=not is_stuck)
