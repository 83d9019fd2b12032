"""One rank's failure becomes every rank's: a rank that raised alone would leave the others waiting in a collective."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from lightning_3d.errors import CheckpointError, CheckpointNotFoundError


@contextmanager
def failing_alike(action: str, group: dist.ProcessGroup | None = None) -> Iterator[None]:
    """Raise on all ranks what any of them raised in the body.

    Every rank must reach the end of the body whatever happens on the others, so a collective in it must come before
    anything that one rank alone could raise, or, as those of torch.distributed.checkpoint do, share its failures.

    Args:
        action: The action of the body, for the message: "write the checkpoint /path".
        group: A group of all ranks; the default one without it.

    Raises:
        CheckpointError: On every rank, with the first failing rank's reason.
        CheckpointNotFoundError: That rank found no file.

    """
    error: BaseException | None = None
    try:
        yield
    except (Exception, CheckpointException) as raised:  # the latter is a BaseException
        error = raised
    reasons: list[tuple[bool, str, bool] | None] = [None] * dist.get_world_size()
    own = None
    if error is not None:
        own = _is_of_others(error), _reason(error), isinstance(error, FileNotFoundError)
    dist.all_gather_object(reasons, own, group)
    failures = {rank: reason for rank, reason in enumerate(reasons) if reason is not None}
    if failures:
        first = {rank: reason for rank, reason in failures.items() if not reason[0]} or failures
        rank, (_, reason, is_missing) = next(iter(first.items()))
        who = f"rank {rank}" + (f" and {len(first) - 1} more" if len(first) > 1 else "")
        kind = CheckpointNotFoundError if is_missing else CheckpointError
        raise kind(f"Could not {action} ({who}). {reason}") from error


def _is_of_others(error: BaseException) -> bool:
    """Whether torch.distributed.checkpoint says that other ranks have failed."""
    return isinstance(error, CheckpointException) and dist.get_rank() not in error.failures


def _reason(error: BaseException) -> str:
    if isinstance(error, CheckpointException):
        error = next(iter(error.failures.values()))[0]
    return str(error) if isinstance(error, CheckpointError) else f"{type(error).__name__}: {error}"
