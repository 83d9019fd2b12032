"""The law on the device: a part of the cover, against one process on the CPU."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import pytest

from tests.gpu import DEVICE
from tests.law.conftest import KNOWN
from tests.law.cover import Case, cover, said_of
from tests.law.judge import LISTED, Judge
from tests.law.references import reference_of
from tests.law.run import run_case
from tests.second_device import device
from tests.second_device.ranks import RanksOf

pytestmark = pytest.mark.gpu

EVERY = int(os.environ.get("LAW_EVERY", 7))
"""Of so many cases of the cover one is run."""

DRAW = {"drops", "dropping", "proximal-policy"}
"""Models that draw random numbers, which are others on each kind of device."""

OF_THE_DEVICE = (
    *("hook for exceptions", "processes per node puts tensor-parallel groups across nodes"),
    *("An output with one or more elements was resized", "there was no current CUDA context"),
    "Accessing the data pointer of FakeTensor",  # recurrent layers lay out their weights anew
)
"""What a run leaves as it makes a process group of the device's backend and a node of each rank, and what torch warns
of on devices."""

_EXPERTS = "experts' tokens are counted, or multiplied in groups, by kernels that CPUs lack"
_CELL = "torch takes a fused cell, which CPUs, whose kernels the second device has, lack"

LEFT = {
    **dict.fromkeys(("deepseek-v3.*", "gpt-oss.*", "mixtral-*", "qwen3-moe.*"), _EXPERTS),
    **dict.fromkeys(("lstm.*", "unrolled-cell.*", "odd-matrices.*"), _CELL),
    **dict.fromkeys(("llama4.*", "odd-blocks.*"), "the second device crashes; why was not looked into"),
    "diffusers-unet.*": "a normalisation views what lies with channels last",
    "paths.*": "torch makes new parameters on devices that it has not itself, and hooks stay behind",
    "*.shampoo*": "its optimizer can't be tried there",
    "*.budget.*": "the second device has no statistics of an allocator",
}
"""Cases that the second device can't run -> why."""

LEFT_BY_ALL = {"*.deferred.*": "the device draws the initial weights by its own generator"}
"""Cases that no device runs as the CPU does -> why."""


def _row(case: Case) -> Any:
    left = said_of(case, LEFT | LEFT_BY_ALL if DEVICE == device.NAME else LEFT_BY_ALL)
    marks = [pytest.mark.skip(reason=f"left: {why}") for why in left]
    return pytest.param(replace(case, accelerator=DEVICE), id=str(case), marks=marks)


CASES = [case for case in cover() if case.model not in DRAW and not said_of(case, KNOWN)]


@pytest.mark.parametrize("at", [_row(case) for case in CASES[::EVERY]])
def test_case(ranks: RanksOf, at: Case) -> None:
    reference = reference_of(at)
    problems = Judge(at, reference).problems(ranks(at.layout_row.world_size).run(run_case, at, at.layout_row))
    problems = [problem for problem in problems if not any(text in problem for text in OF_THE_DEVICE)]
    assert not problems, "\n".join(problems[:LISTED])
