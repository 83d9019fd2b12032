"""The worker pool itself: results, failures and hangs of ranks."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.workers import WorkerError, WorkerPools


def _rank_and(value: torch.Tensor) -> tuple[int, torch.Tensor]:
    total = value.clone()
    dist.all_reduce(total)
    return dist.get_rank(), total


def _fail_on(bad_rank: int) -> None:
    print(f"rank {dist.get_rank()} was here")
    if dist.get_rank() == bad_rank:
        raise ValueError(f"bad luck on {bad_rank}")
    dist.barrier()


def _hang_on(bad_rank: int) -> None:
    if dist.get_rank() == bad_rank:
        time.sleep(600)


def _leave_traces() -> tuple[str, str | None, list[str], int]:
    before = (os.getcwd(), os.environ.get("LEFT_BEHIND"), os.listdir(), os.getpid())
    dist.barrier()
    os.environ["LEFT_BEHIND"] = "yes"
    Path(f"left_behind_{dist.get_rank()}").touch()
    return before


def test_failing_rank_is_reported_and_pool_works_afterwards(workers: WorkerPools) -> None:
    with pytest.raises(WorkerError, match="bad luck on 1") as caught:
        workers(2).run(_fail_on, 1)
    message = str(caught.value)
    assert "--- rank 1:\nTraceback" in message
    assert "_fail_on" in message
    assert "rank 1 was here" in message
    assert "--- rank 0: not finished" in message
    assert "barrier" in message  # the stack of the rank that waited
    assert "ValueError: bad luck on 1" in caught.value.failures[1]
    assert [rank for rank, _ in workers(2).run(_rank_and, torch.ones(1))] == [0, 1]


def test_hanging_rank_times_out_and_pool_works_afterwards(workers: WorkerPools) -> None:
    with pytest.raises(WorkerError, match="not finished after 2 s") as caught:
        workers(2).run(_hang_on, 1, timeout=2.0)
    assert "_hang_on" in str(caught.value)  # the stack of the hanging rank
    assert [rank for rank, _ in workers(2).run(_rank_and, torch.ones(1))] == [0, 1]


def test_runs_share_processes_but_no_directory_and_no_environment(workers: WorkerPools) -> None:
    first, second = workers(2).run(_leave_traces), workers(2).run(_leave_traces)
    assert first[0][0] == first[1][0]
    assert second[0][0] != first[0][0]
    assert not Path(first[0][0]).exists()
    assert [(left, files) for _, left, files, _ in first + second] == [(None, [])] * 4
    assert [pid for *_, pid in first] == [pid for *_, pid in second]
