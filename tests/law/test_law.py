"""Any layout = one process: the cases of the cover, and any other by its name (`--law "llama*.pp2.bf16.*"`).

A case that fails is run once more, alone in fresh processes. If it fails again, that is its result, with the stacks of
ranks that hang; if it passes then, it is flaky, which the end of the run tells, and `make test-matrix` fails for it.
"""

from __future__ import annotations

import os

import pytest

from tests.conftest import FLAKY, SEED
from tests.law.cover import Case
from tests.law.judge import LISTED, Judge
from tests.law.references import reference_of
from tests.law.run import run_case
from tests.workers import WorkerError, WorkerPools


def judged(workers: WorkerPools, case: Case) -> list[str]:
    """The problems of a case; a crash or a hang, with the ranks and their stacks, is one."""
    reference = reference_of(case)
    try:
        ranks = workers(case.layout_row.world_size).run(run_case, case, case.layout_row)
    except WorkerError as error:
        return [str(error)]
    return Judge(case, reference).problems(ranks)


def test_law(workers: WorkerPools, case: Case, request: pytest.FixtureRequest) -> None:
    problems = judged(workers, case)
    if not problems:
        return
    workers(case.layout_row.world_size).close()
    again = judged(workers, case)
    shown = again or problems
    listed = shown[:LISTED] + [f"and {len(shown) - LISTED} more"] * (len(shown) > LISTED)
    text = "\n".join([f"{case}, {SEED}={os.environ[SEED]}: {len(shown)} problems:", *listed])
    if not again:
        request.node.user_properties.append((FLAKY, text))
        if request.node.get_closest_marker("matrix") is None:
            return
        text = f"flaky, as it passes the second time: {text}"
    pytest.fail(text, pytrace=False)
