"""The law on the device: every seventh case of the cover, against one process on the CPU."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.gpu import DEVICE
from tests.law.cover import Case, cover
from tests.law.judge import LISTED, Judge
from tests.law.references import reference_of
from tests.law.run import run_case
from tests.second_device.ranks import RanksOf

pytestmark = pytest.mark.gpu

CASES = [replace(case, accelerator=DEVICE) for case in list(cover())[::7]]


@pytest.mark.parametrize("at", CASES, ids=str)
def test_case(ranks: RanksOf, at: Case) -> None:
    reference = reference_of(at)
    problems = Judge(at, reference).problems(ranks(at.layout_row.world_size).run(run_case, at, at.layout_row))
    assert not problems, "\n".join(problems[:LISTED])
