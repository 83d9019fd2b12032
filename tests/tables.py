"""Tables of cases, of which `make test` runs some and `make test-matrix` the others."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest


def some_in_matrix(cases: Iterable[Any], is_in_matrix: Callable[..., bool]) -> list[Any]:
    """Cases for `pytest.mark.parametrize`.

    Args:
        cases: A tuple has a value for each argument of the test.
        is_in_matrix: Whether only `make test-matrix` runs a case; called with its values.
    """
    rows = [case if isinstance(case, tuple) else (case,) for case in cases]
    return [pytest.param(*row, marks=[pytest.mark.matrix] if is_in_matrix(*row) else []) for row in rows]
