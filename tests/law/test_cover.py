"""The cover has every pair that is asked for: `python -m tests.law.cover` adds what is missing."""

from __future__ import annotations

from tests.law.cover import cover, extended, pairs, wanted


def test_every_pair_is_covered() -> None:
    cases = cover()
    assert all(case.is_allowed for case in cases)
    assert wanted() <= {pair for case in cases for pair in pairs(case)}


def test_a_missing_case_is_made_up_for() -> None:
    cases = cover()[1:]
    assert wanted() <= {pair for case in extended(cases) for pair in pairs(case)}
