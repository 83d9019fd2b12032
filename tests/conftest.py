"""Fixtures that all tests share."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator

import pytest
import torch

from tests.parity import ReferenceRun
from tests.workers import WorkerPools

torch.set_num_threads(1)  # as on the ranks; small tensors gain nothing from more, and threads that wait for work spin

COMPILED = "TORCHINDUCTOR_CACHE_DIR"


def pytest_configure(config: pytest.Config) -> None:
    """Keep what inductor compiles in a folder of this run, which its processes share.

    A process that is killed while it compiles leaves half a library, which every later run would fail to load.
    """
    if not hasattr(config, "workerinput"):  # processes that share out the files have it from the one that starts them
        os.environ[COMPILED] = tempfile.mkdtemp(prefix="compiled-")
        config.add_cleanup(_forget_compiled)


def _forget_compiled() -> None:
    shutil.rmtree(os.environ.pop(COMPILED), ignore_errors=True)


@pytest.fixture(scope="session")
def workers() -> Iterator[WorkerPools]:
    """`workers(n).run(function, *args)`: run a function on n ranks; the processes live as long as the session."""
    with WorkerPools() as pools:
        yield pools


@pytest.fixture(scope="module")
def references() -> dict[str, ReferenceRun]:
    """The runs of one process by name, filled as they are needed."""
    return {}
