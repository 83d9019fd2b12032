"""The cover has every pair that is asked for: `python -m tests.law.cover` adds what is missing."""

from __future__ import annotations

from tests.law.cover import cover, pairs, wanted


def test_every_pair_is_covered() -> None:
    cases = cover()
    assert all(case.is_allowed for case in cases)
    assert wanted() <= {pair for case in cases for pair in pairs(case)}
