"""Programs that do what examples of Lightning do: the numbers of Lightning's DDP, or of one process.

The documentation's table is `EXAMPLES`. The plain suite runs some of them, `make test-matrix` all.
"""

from __future__ import annotations

import contextlib
import re
from pathlib import Path

import pytest
import torch

from tests.examples.place import DDP, LAYOUTS, ONE_PROCESS, REFERENCES, Outcome
from tests.examples.table import EXAMPLES, Example
from tests.tables import some_in_matrix
from tests.workers import WorkerError, WorkerPools

pytestmark = pytest.mark.filterwarnings("default")  # the programs' own


def run(example: Example, places: tuple[str, ...]) -> list[Outcome]:
    outcomes = []
    for name in places:
        Path(name).mkdir(exist_ok=True)
        with contextlib.chdir(name):
            outcomes.append(example.run_in(name))
    return outcomes


def assert_same(found: Outcome, expected: Outcome, where: str) -> None:
    pairs = [
        ("losses", found.losses, expected.losses),
        ("metrics", found.metrics, expected.metrics),
        ("weights", found.weights, expected.weights),
        ("seen", found.seen, expected.seen),
    ]
    for what, values, wanted in pairs:
        try:
            torch.testing.assert_close(values, wanted, atol=1e-5, rtol=1e-5, check_dtype=False)
        except AssertionError as error:
            raise AssertionError(f"{where}, {what}: {error}") from error


@pytest.mark.parametrize(
    "example",
    some_in_matrix(EXAMPLES, lambda example: not example.is_small),
    ids=lambda example: example.run,
)
def test_example_works_or_is_refused(workers: WorkerPools, example: Example) -> None:
    works = [name for name in LAYOUTS if name not in example.refused]
    (alone,) = workers(1).run(run, example, (ONE_PROCESS,))[0]
    ranks = workers(2).run(run, example, (DDP, *works), timeout=200)
    for rank, (under_ddp, *outcomes) in enumerate(ranks):
        assert alone.losses or alone.metrics
        for name, found in zip(works, outcomes, strict=True):
            expected = under_ddp if REFERENCES[name] == DDP else alone
            assert_same(found, expected, f"{name}, rank {rank}")
    for name, refusal in example.refused.items():
        with pytest.raises(WorkerError) as raised:
            workers(2).run(run, example, (name,))
        assert re.search(refusal.message, str(raised.value)), raised.value
        assert len(raised.value.failures) == 2, f"{name}: {raised.value}"
