"""The judge finds planted defects: `make test-judge`."""

from __future__ import annotations

import pytest

from tests.law.cover import Case
from tests.law.defects import DEFECTS, cases
from tests.law.judge import Judge
from tests.law.references import reference_of
from tests.law.run import Run, last_known, run_case
from tests.workers import WorkerPools

pytestmark = pytest.mark.judge


def _run_planted(name: str, case: Case) -> Run:
    last_known.clear()
    try:
        with pytest.MonkeyPatch.context() as patch:
            DEFECTS[name].plant(patch)
            return run_case(case, case.layout_row)
    finally:
        last_known.clear()


@pytest.mark.parametrize(("name", "planted"), [pytest.param(*row, id=f"{row[0]}.{row[1]}") for row in cases()])
def test_defect_is_found(workers: WorkerPools, name: str, planted: Case) -> None:
    ranks = workers(planted.layout_row.world_size).run(_run_planted, name, planted)
    problems = Judge(planted, reference_of(planted)).problems(ranks)
    shown = "\n".join(problems[:20])
    assert any(DEFECTS[name].shows in problem for problem in problems), f"{name} in {planted} is not found:\n{shown}"
