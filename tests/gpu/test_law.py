"""The law on the device: a part of the cover, against one process on the CPU."""

from __future__ import annotations

import os
from dataclasses import replace
from fnmatch import fnmatchcase

import pytest

from tests.gpu import DEVICE
from tests.law.conftest import KNOWN
from tests.law.cover import Case, cover
from tests.law.judge import LISTED, Judge
from tests.law.references import reference_of
from tests.law.run import run_case
from tests.second_device.ranks import RanksOf

pytestmark = pytest.mark.gpu

EVERY = int(os.environ.get("LAW_EVERY", 7))
"""Of so many cases of the cover one is run."""

DRAW = {"drops", "drawing-blocks", "noise"}
"""Models that draw random numbers, which are others on each kind of device."""

OF_THE_DEVICE = (
    *("hook for exceptions", "processes per node puts tensor-parallel groups across nodes"),
    *("An output with one or more elements was resized", "there was no current CUDA context"),
)
"""What a run leaves as it makes a process group of the device's backend and a node of each rank, and what torch warns
of on devices."""

_LEFT = [case for case in cover() if case.model not in DRAW and not any(fnmatchcase(str(case), name) for name in KNOWN)]

CASES = [replace(case, accelerator=DEVICE) for case in _LEFT[::EVERY]]


@pytest.mark.parametrize("at", CASES, ids=str)
def test_case(ranks: RanksOf, at: Case) -> None:
    reference = reference_of(at)
    problems = Judge(at, reference).problems(ranks(at.layout_row.world_size).run(run_case, at, at.layout_row))
    problems = [problem for problem in problems if not any(text in problem for text in OF_THE_DEVICE)]
    assert not problems, "\n".join(problems[:LISTED])
