"""Failures of checkpoints: a sentence on what could not be done and why, on all ranks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from lightning_3d.distributed.agreement import raise_on_all_ranks
from lightning_3d.errors import CheckpointError, CheckpointNotFoundError


@contextmanager
def collective_errors(action: str, group: dist.ProcessGroup | None = None) -> Iterator[None]:
    """Raise on all ranks what any of them raises inside, as `raise_on_all_ranks` does.

    Args:
        action: The action inside, for the message: "write the checkpoint /path".
        group: A group of all ranks; the default one without it.

    Raises:
        CheckpointError: On every rank, with the first failing rank's reason.
        CheckpointNotFoundError: That rank found no file.

    """
    with raise_on_all_ranks(group):
        try:
            yield
        except (Exception, CheckpointException) as error:  # the latter is a BaseException, and of all ranks
            failures = error.failures if isinstance(error, CheckpointException) else {dist.get_rank(): (error, None)}
            rank, (cause, _) = next(iter(failures.items()))
            kind = CheckpointNotFoundError if isinstance(error, FileNotFoundError) else CheckpointError
            reason = f"{cause}" if isinstance(cause, CheckpointError) else f"{type(cause).__name__}: {cause}"
            raise kind(f"Could not {action} (rank {rank}). {reason}") from error
