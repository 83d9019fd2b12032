"""The law on the device: a part of the cover, against one process on the CPU."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest

from tests.gpu import DEVICE
from tests.law.cover import Case, cover
from tests.law.judge import LISTED, Judge
from tests.law.references import reference_of
from tests.law.run import run_case
from tests.second_device.ranks import RanksOf

pytestmark = pytest.mark.gpu

EVERY = int(os.environ.get("LAW_EVERY", 7))
"""Of so many cases of the cover one is run."""

DRAW = {"drops", "drawing-blocks"}
"""Models that draw random numbers, which are others on each kind of device."""

OF_THE_DEVICE = ("hook for exceptions", "An output with one or more elements was resized")
"""What a run leaves, as it makes a process group of the device's backend; what torch warns of on the second device."""

CASES = [replace(case, accelerator=DEVICE) for case in [c for c in cover() if c.model not in DRAW][::EVERY]]


@pytest.mark.parametrize("at", CASES, ids=str)
def test_case(ranks: RanksOf, at: Case) -> None:
    reference = reference_of(at)
    problems = Judge(at, reference).problems(ranks(at.layout_row.world_size).run(run_case, at, at.layout_row))
    problems = [problem for problem in problems if not any(text in problem for text in OF_THE_DEVICE)]
    assert not problems, "\n".join(problems[:LISTED])
