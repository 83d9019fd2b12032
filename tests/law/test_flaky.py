"""Cases that pass only when they are run again are told, and fail `make test-matrix`."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from tests.conftest import FLAKY
from tests.law import test_law
from tests.law.cover import Case
from tests.workers import WorkerPools


def _request(marks: set[str]) -> Any:
    return SimpleNamespace(
        node=SimpleNamespace(user_properties=[], get_closest_marker=lambda name: name in marks or None)
    )


def test_a_case_that_passes_the_second_time(workers: WorkerPools, monkeypatch: pytest.MonkeyPatch) -> None:
    results = [["lost a gradient"], [], ["lost a gradient"], [], ["lost a gradient"], ["lost another"]]
    monkeypatch.setattr(test_law, "judged", lambda *args: results.pop(0))
    plain, of_matrix = _request(set()), _request({"matrix"})
    test_law.test_law(workers, Case("mlp", "pp2"), plain)
    assert [name for name, text in plain.node.user_properties if "lost a gradient" in cast(str, text)] == [FLAKY]
    with pytest.raises(pytest.fail.Exception, match=r"flaky, .*mlp.pp2.plain.none, LAW_SEED=.*\nlost a gradient"):
        test_law.test_law(workers, Case("mlp", "pp2"), of_matrix)
    with pytest.raises(pytest.fail.Exception, match="lost another"):
        test_law.test_law(workers, Case("mlp", "pp2"), plain)
    assert not results
