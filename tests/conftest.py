"""Fixtures that all tests share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.parity import ReferenceRun
from tests.workers import WorkerPools


@pytest.fixture(scope="session")
def workers() -> Iterator[WorkerPools]:
    """`workers(n).run(function, *args)`: run a function on n ranks; the processes live as long as the session."""
    with WorkerPools() as pools:
        yield pools


@pytest.fixture(scope="module")
def references() -> dict[str, ReferenceRun]:
    """The runs of one process by name, filled as they are needed."""
    return {}
