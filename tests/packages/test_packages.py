"""LightningModules of other packages, unmodified: the numbers of one process in dp 2, pp 2 and tp 2.

`make test-packages` installs the packages and runs this. The documentation's table is `TABLE`.
"""

from __future__ import annotations

import importlib
from functools import cache

import pytest

from tests.packages.parity import Outcome, PackageJob, assert_same_as_one_process, train
from tests.packages.table import LAYOUTS, TABLE, Row
from tests.workers import WorkerPools

pytestmark = pytest.mark.filterwarnings("default")  # they warn in their own ways

CASES = [pytest.param(row, layout, id=f"{row.package}-{row.module}-{layout}") for row in TABLE for layout in LAYOUTS]


def job_of(row: Row) -> PackageJob:
    pytest.importorskip(row.imported)
    jobs = importlib.import_module(f"tests.packages.{row.jobs}").JOBS
    job: PackageJob = jobs[row.module]
    return job


@cache
def one_process(row: Row) -> Outcome:
    return train(job_of(row), None)


@pytest.mark.parametrize(("row", "layout"), CASES)
def test_module_trains_as_in_one_process(workers: WorkerPools, row: Row, layout: str) -> None:
    is_whole = layout in row.whole
    assert_same_as_one_process(workers, job_of(row), one_process(row), LAYOUTS[layout], is_whole=is_whole)
