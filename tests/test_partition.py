"""The cut into stages is the best one, by brute force over all cuts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import combinations, pairwise

from hypothesis import given
from hypothesis import strategies as st

from lightning_3d.planning.partition import StageLoad, additive, least_greatest_load, partition


def _all_cuts(num_calls: int, num_stages: int) -> Iterator[list[int]]:
    for starts in combinations(range(1, num_calls), num_stages - 1):
        yield [sum(start <= call for start in starts) for call in range(num_calls)]


def _cost(stages: Sequence[int], load: StageLoad, boundary_bytes: Sequence[int]) -> tuple[int, int, int]:
    """(greatest load, bytes over all boundaries, sum of squared loads)."""
    bounds = [0, *(i for i in range(1, len(stages)) if stages[i] != stages[i - 1]), len(stages)]
    loads = [load(stage, start, stop) for stage, (start, stop) in enumerate(pairwise(bounds))]
    return max(loads), sum(boundary_bytes[i - 1] for i in bounds[1:-1]), sum(value * value for value in loads)


@st.composite
def _problems(draw: st.DrawFn) -> tuple[StageLoad, list[int], int]:
    """A load that depends on the stage, as activations do, or not; bytes at each boundary; the number of stages."""
    num_calls = draw(st.integers(1, 9))
    num_stages = draw(st.integers(1, num_calls))
    loads = st.lists(st.integers(0, draw(st.sampled_from([1, 3, 10**12]))), min_size=num_calls, max_size=num_calls)
    boundary_bytes = draw(st.lists(st.integers(0, 5), min_size=num_calls - 1, max_size=num_calls - 1))
    if draw(st.booleans()):
        return additive(draw(loads)), boundary_bytes, num_stages
    rows = [draw(loads) for _ in range(num_stages)]
    return lambda stage, start, stop: sum(rows[stage][start:stop]), boundary_bytes, num_stages


@given(_problems())
def test_partition_equals_brute_force(problem: tuple[StageLoad, list[int], int]) -> None:
    load, boundary_bytes, num_stages = problem
    num_calls = len(boundary_bytes) + 1
    stages = partition(load, boundary_bytes, num_stages)
    assert stages == sorted(stages)
    assert set(stages) == set(range(num_stages))
    best = min(_cost(cut, load, boundary_bytes) for cut in _all_cuts(num_calls, num_stages))
    assert _cost(stages, load, boundary_bytes) == best
    assert least_greatest_load(load, num_calls, num_stages) == best[0]
