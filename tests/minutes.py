"""Where the minutes of a run of tests go: by file, and those of the law by setting and by layout."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator

import pytest

SHOWN = 12
"""Names in a line."""


def lines(reports: Iterable[pytest.TestReport]) -> list[str]:
    """A line for each way to share them out, the most first."""
    seconds: dict[str, Counter[str]] = {}
    for report in reports:
        for table, name in _places(report.nodeid):
            seconds.setdefault(table, Counter())[name] += report.duration
    return [f"minutes by {table}: {_most(counted)}" for table, counted in seconds.items()]


def _places(nodeid: str) -> Iterator[tuple[str, str]]:
    file, _, test = nodeid.partition("::")
    yield "file", file.removeprefix("tests/").removesuffix(".py")
    names = test.removeprefix("test_law[").removesuffix("]").split(".")
    if test.startswith("test_law[") and len(names) == 4:  # a pattern may name no case
        _, layout, setting, _ = names
        yield "setting of the law", setting
        yield "layout of the law", layout


def _most(seconds: Counter[str]) -> str:
    shown = [f"{name} {spent / 60:.1f}" for name, spent in seconds.most_common(SHOWN)]
    rest = sum(seconds.values()) - sum(spent for _, spent in seconds.most_common(SHOWN))
    return ", ".join(shown + [f"{len(seconds) - SHOWN} more {rest / 60:.1f}"] * (len(seconds) > SHOWN))
