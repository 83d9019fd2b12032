"""Which cases are collected: those of the cover, a sample for `make test-matrix`, and those asked for by `--law`."""

from __future__ import annotations

import os
from typing import Any

import pytest

from tests.conftest import SEED
from tests.law.cover import Case, cover, named, said_of, sample

SAMPLED = 100
"""Cases of the sample."""


_DECAYS = (
    "parameters whose outputs cross to the next stage but not into the loss get zeros, not None, and weights decay"
)

_GATHERED = (
    "a linear layer on data gathers its input again in the backward, with sequence parallel, which is in no plan"
)

_LATE = (
    "at ZeRO stage 3, gradients of blocks before one that takes gradients in its forward come after on_after_backward"
)

_READ_BETWEEN = (
    "inline, a weight that is read between blocks lies on one stage: a call of the model in a hook is refused, not made"
)

_COLLECTED = (
    "with sequence parallel, what hooks inside of a block collect for the loss (scores of experts) lies in slices, and"
    " is refused"
)

KNOWN = {
    "mixtral-balanced.tp2.sequence*": _COLLECTED,
    "loss-*.pp*.groups.*": _DECAYS,
    "loss-*.pp*.adamw.*": _DECAYS,
    "odd-gpt.*zero3.*.hooks": _LATE,
    "linear-on-data.tp*.sequence*": _GATHERED,
    "ties.pp*.inline.calls": _READ_BETWEEN,
}
"""Defects that the judge has found and that are not mended yet: names of cases -> what is wrong."""


def _row(case: Case, *marks: pytest.MarkDecorator) -> Any:
    known = [pytest.mark.xfail(reason=why, strict=True) for why in said_of(case, KNOWN)]
    return pytest.param(case, id=str(case), marks=[*marks, *known])


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Give `case` its values."""
    if "case" not in metafunc.fixturenames:
        return
    pattern = metafunc.config.getoption("--law")
    rows = [_row(case) for case in (named(pattern) if pattern else cover())]
    if not pattern:
        seed = int(os.environ[SEED])
        rows += [_row(case, pytest.mark.matrix) for case in sample(seed, SAMPLED)]
    metafunc.parametrize("case", rows)
