"""What numbers of microbatches mean for their batch: constants, numbers of samples, counts, and what is refused."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import hypothesis
import pytest
import torch
from hypothesis import strategies as st

from lightning_3d.errors import StepError
from lightning_3d.pipeline.effects.evidence import Evidence
from lightning_3d.pipeline.effects.join import Joiner

DIFFERENT, EQUAL = (4, 3, 5), (4, 4, 4)


@pytest.mark.parametrize(
    ("values", "sizes", "expected"),
    [
        ([2, 2, 2], DIFFERENT, 2),
        ([4, 3, 5], DIFFERENT, 12),
        ([8, 6, 10], DIFFERENT, 24),
        ([0, 0, 0], EQUAL, 0),
        ([torch.tensor(2)] * 3, DIFFERENT, torch.tensor(2)),
        ([torch.tensor(1), torch.tensor(3), torch.tensor(2)], EQUAL, torch.tensor(6)),
        ([torch.tensor([1, 2])] * 3, DIFFERENT, torch.tensor([1, 2])),
        ([torch.tensor([1, 0]), torch.tensor([1, 2])], (3, 3), torch.tensor([2, 2])),
    ],
    ids=str,
)
def test_integers_of_microbatches(values: Sequence[Any], sizes: Sequence[int], expected: Any) -> None:
    assert torch.equal(torch.as_tensor(Joiner().join(values, sizes, "x")), torch.as_tensor(expected))


@pytest.mark.parametrize("values", [[4, 4, 4], [2, 2, 2], [torch.tensor(3)] * 3], ids=str)
def test_equal_integers_in_microbatches_of_equal_size_are_refused(values: Sequence[Any]) -> None:
    with pytest.raises(StepError, match=r"x is \d, \d, \d in the microbatches of a batch, of 4, 4, 4 samples"):
        Joiner().join(values, EQUAL, "x")


@pytest.mark.parametrize(
    ("seen", "values", "expected"), [([2, 2, 2], [4, 4, 4], 4), ([4, 3, 5], [4, 4, 4], 12)], ids=str
)
def test_what_other_sizes_showed_holds_for_equal_ones(seen: list[int], values: list[int], expected: int) -> None:
    joiner = Joiner()
    joiner.join(seen, DIFFERENT, "x")
    assert joiner.join(values, EQUAL, "x") == expected
    with pytest.raises(StepError, match="y is 4, 4, 4"):
        joiner.join(values, EQUAL, "y")


def test_numbers_that_differ_otherwise_are_refused_but_for_counters() -> None:
    with pytest.raises(StepError, match="x has values there that can't be joined"):
        Joiner().join([1, 3, 2], EQUAL, "x")
    assert Joiner().number([1, 3, 2], EQUAL, "the growth of x") == 6


def test_zeros_show_nothing() -> None:
    joiner = Joiner()
    assert joiner.number([0, 0, 0], DIFFERENT, "x") == 0
    with pytest.raises(StepError, match="x is 1, 1, 1"):
        joiner.number([1, 1, 1], EQUAL, "x")


def test_a_constant_that_turns_out_to_be_a_count_is_refused() -> None:
    joiner = Joiner()
    joiner.number([1, 1, 1], DIFFERENT, "x")
    assert joiner.number([1, 1, 1], EQUAL, "x") == 1
    with pytest.raises(StepError, match="x was the same in all microbatches of earlier batches"):
        joiner.number([1, 0, 1], EQUAL, "x")


def test_rows_are_as_long_as_there_are_samples_whatever_the_size() -> None:
    table, joiner = torch.arange(8.0), Joiner()
    assert len(joiner.join([torch.zeros(4), torch.zeros(3)], (4, 3), "rows")) == 7
    assert len(joiner.join([table, table], (4, 3), "table")) == 8
    assert len(joiner.join([table, table], (4, 4), "table")) == 8
    assert len(joiner.join([table, table], (4, 4), "unknown")) == 16


def test_an_unknown_number_is_studied_once_per_step() -> None:
    joiner, studies = Joiner(), []

    def study() -> None:
        studies.append("studied")
        joiner.number([1, 1, 2], (1, 1, 2), "samples")

    for _ in range(2):
        joiner.evidence.study = study
        assert joiner.number([4, 4, 4], EQUAL, "samples") == 12
    assert studies == ["studied"]
    with pytest.raises(StepError, match="steps is 1, 1, 1"):
        joiner.number([1, 1, 1], EQUAL, "steps")
    assert len(studies) == 2


@hypothesis.given(
    st.lists(st.integers(1, 9), min_size=2, max_size=2, unique=True),
    st.integers(0, 2),
    st.lists(st.integers(1, 9), min_size=2, max_size=2),
)
def test_what_parts_of_two_sizes_show_holds(sizes: list[int], dim: int, shape: list[int]) -> None:
    """The dimension that has as many as each part has samples; it holds for parts of one size, too."""
    parts, evidence = [torch.zeros([*shape[:dim], size, *shape[dim:]]) for size in sizes], Evidence()
    assert evidence.row_dim(parts, sizes, "value") == dim
    assert evidence.row_dim(parts[:1] * 2, sizes[:1] * 2, "value") == dim
    assert evidence.row_dim([torch.zeros(6, 9)] * 2, sizes, "none") is None
    assert evidence.row_dim([torch.zeros(())] * 2, sizes[:1] * 2, "scalar") is None
