"""Any layout = one process: the cases of the cover, and any other by its name (`--law "llama*.pp2.bf16.*"`)."""

from __future__ import annotations

from tests.law.cover import Case
from tests.law.judge import LISTED, Judge
from tests.law.references import reference_of
from tests.law.run import run_case
from tests.workers import WorkerPools


def judged(workers: WorkerPools, case: Case) -> list[str]:
    """The problems of a case."""
    reference = reference_of(case)
    ranks = workers(case.layout_row.world_size).run(run_case, case, case.layout_row)
    return Judge(case, reference).problems(ranks)


def test_law(workers: WorkerPools, case: Case) -> None:
    problems = judged(workers, case)
    listed = problems[:LISTED] + [f"and {len(problems) - LISTED} more"] * (len(problems) > LISTED)
    assert not problems, f"{case}: {len(problems)} problems:\n" + "\n".join(listed)
