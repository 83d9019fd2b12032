"""The cut into stages is the best one, by brute force over all cuts."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator, Sequence
from itertools import combinations

import pytest

from lightning_3d.planning.partition import StageLoad, additive, least_greatest_load, partition


def _all_cuts(num_calls: int, num_stages: int) -> Iterator[list[int]]:
    for starts in combinations(range(1, num_calls), num_stages - 1):
        yield [sum(start <= call for start in starts) for call in range(num_calls)]


def _cost(stages: Sequence[int], load: StageLoad, boundary_bytes: Sequence[int]) -> tuple[int, int, int]:
    """(greatest load, bytes over all boundaries, sum of squared loads)."""
    loads = [
        load(stage, stages.index(stage), len(stages) - stages[::-1].index(stage)) for stage in range(stages[-1] + 1)
    ]
    crossing = sum(boundary_bytes[i - 1] for i in range(1, len(stages)) if stages[i] != stages[i - 1])
    return max(loads), crossing, sum(value * value for value in loads)


def _per_stage(rows: Sequence[Sequence[int]]) -> StageLoad:
    """A load that depends on the stage, as activations do."""
    return lambda stage, start, stop: sum(rows[stage][start:stop])


@pytest.mark.parametrize("greatest", [1, 3, 100, 10**12])  # small ones make many equals
def test_partition_equals_brute_force(greatest: int) -> None:
    rng = random.Random(greatest)
    for _ in range(150):
        num_calls = rng.randint(1, 10)
        num_stages = rng.randint(1, num_calls)
        boundary_bytes = [rng.randint(0, min(greatest, 5)) for _ in range(num_calls - 1)]
        rows = [[rng.randint(0, greatest) for _ in range(num_calls)] for _ in range(num_stages)]
        for load in (additive(rows[0]), _per_stage(rows)):
            stages = partition(load, boundary_bytes, num_stages)
            assert sorted(set(stages)) == list(range(num_stages))
            assert stages == sorted(stages)
            best = min(_cost(cut, load, boundary_bytes) for cut in _all_cuts(num_calls, num_stages))
            assert _cost(stages, load, boundary_bytes) == best
            assert least_greatest_load(load, num_calls, num_stages) == best[0]


def test_bytes_decide_among_equally_slow_cuts() -> None:
    load = additive([1, 1, 1, 1, 4])
    assert partition(load, [5, 5, 9, 5], 3) == [0, 0, 1, 1, 2]  # 10 bytes; the most even of them
    assert partition(load, [5, 5, 3, 5], 3) == [0, 0, 0, 1, 2]
    assert partition(load, [5, 5, 3, 9], 3)[-2:] == [1, 2], "fewer bytes never make the slowest stage slower"


def test_a_thousand_calls_take_seconds() -> None:
    rng = random.Random(0)
    load = additive([rng.randint(1, 1000) for _ in range(1000)])
    start = time.perf_counter()
    assert partition(load, [rng.randint(1, 9) for _ in range(999)], 16)[-1] == 15
    assert time.perf_counter() - start < 30
