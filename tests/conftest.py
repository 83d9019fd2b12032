"""Fixtures that all tests share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.workers import WorkerPools


@pytest.fixture(scope="session")
def workers() -> Iterator[WorkerPools]:
    """`workers(n).run(function, *args)`: run a function on n ranks; the processes live as long as the session."""
    with WorkerPools() as pools:
        yield pools
