"""Fixtures and filters of the tests of other packages' modules."""

from __future__ import annotations

import pytest

from tests.packages.parity import Outcome


@pytest.fixture(scope="session")
def outcomes() -> dict[str, Outcome]:
    """The runs of one process by name of the job, filled as they are needed."""
    return {}
