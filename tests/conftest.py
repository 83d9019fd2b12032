"""Fixtures that all tests share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.parity import ReferenceRun
from tests.workers import WorkerPools

torch.set_num_threads(1)  # as on the ranks; small tensors gain nothing from more, and threads that wait for work spin


@pytest.fixture(scope="session")
def workers() -> Iterator[WorkerPools]:
    """`workers(n).run(function, *args)`: run a function on n ranks; the processes live as long as the session."""
    with WorkerPools() as pools:
        yield pools


@pytest.fixture(scope="module")
def references() -> dict[str, ReferenceRun]:
    """The runs of one process by name, filled as they are needed."""
    return {}
