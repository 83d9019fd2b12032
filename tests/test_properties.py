"""Properties of what is pure: windows, orders of schedules, cuts into stages."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain, combinations, pairwise
from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from lightning_3d.planning.partition import StageLoad, additive, least_greatest_load, partition
from lightning_3d.planning.schedule_order import Computation, schedule_order
from lightning_3d.zero.offload.windows import Part, deal

SHAPES = st.lists(st.integers(0, 5), max_size=3).map(tuple)


# ------------------------------------------------------------------------------------------------------------- windows


@given(st.lists(SHAPES, max_size=6), st.integers(0, 200))
def test_windows_have_every_part_once_and_are_bounded(shapes: list[Any], num_bytes: int) -> None:
    values = [nn.Parameter(torch.zeros(shape)) for shape in shapes]
    parts = [Part(parameter=value, values=value, gradient=value.detach()) for value in values]
    windows = deal(parts, num_bytes)
    assert len(windows) == 1 or all(windows)
    assert list(chain(*windows)) == parts
    for window in windows:
        assert len(window) == 1 or sum(part.values.nbytes for part in window) <= num_bytes


# ----------------------------------------------------------------------------------------------------------- schedules


def _needs(done: Computation, last: int) -> list[Computation]:
    """What has to be computed before."""
    kind, stage, microbatch = done
    if kind == "forward":
        return [Computation("forward", stage - 1, microbatch)] if stage else []
    if kind == "weight":
        return [Computation("input", stage, microbatch)]
    later = [] if stage == last else [Computation(kind, stage + 1, microbatch)]
    return [Computation("forward", stage, microbatch), *later]


@given(
    st.sampled_from(["gpipe", "1f1b", "interleaved", "interleaved_zero_bubble", "zbv"]),
    st.integers(1, 4),
    st.integers(1, 3),
    st.integers(1, 9),
)
def test_schedules_compute_all_once_and_never_wait_for_each_other(
    schedule: str, num_ranks: int, num_per_rank: int, num_microbatches: int
) -> None:
    ranks = list(range(num_ranks))
    per_rank = {"gpipe": num_per_rank, "1f1b": 1, "zbv": 2}.get(schedule, max(2, num_per_rank))
    stage_ranks = [*ranks, *reversed(ranks)] if schedule == "zbv" else ranks * per_rank
    orders = schedule_order(schedule, stage_ranks, num_microbatches)
    every = [computation for order in orders for computation in order]
    assert len(set(every)) == len(every)
    assert all(stage_ranks[c.stage] == rank for rank, order in enumerate(orders) for c in order)
    pairs = {(stage, m) for stage in range(len(stage_ranks)) for m in range(num_microbatches)}
    assert {(c.stage, c.microbatch) for c in every if c.kind == "forward"} == pairs
    whole = {(c.stage, c.microbatch) for c in every if c.kind == "backward"}
    halves = [{(c.stage, c.microbatch) for c in every if c.kind == kind} for kind in ("input", "weight")]
    assert halves[0] == halves[1] == pairs - whole
    done, left, last = set[Computation](), [list(order) for order in orders], len(stage_ranks) - 1
    while any(left):
        ready = [order for order in left if order and all(_is_done(need, done) for need in _needs(order[0], last))]
        assert ready, f"all wait: {[order[:1] for order in left]}"
        done.update(order.pop(0) for order in ready)


def _is_done(need: Computation, done: set[Computation]) -> bool:
    """Whether it is; the gradient of a stage's input comes of either kind of backward."""
    kinds = ("backward", "input") if need.kind in ("backward", "input") else (need.kind,)
    return any(Computation(kind, need.stage, need.microbatch) in done for kind in kinds)


# ------------------------------------------------------------------------------------------------------------ stages


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
