"""Properties of what is pure: buckets, windows, orders of schedules, configs, cuts into stages."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, fields, is_dataclass
from itertools import chain, combinations, pairwise
from types import UnionType
from typing import Annotated, Any, ClassVar, Literal, Union, get_args, get_origin, get_type_hints

import pytest
import torch
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf
from torch import Tensor, nn

from lightning_3d.config.settings import ThreeDConfig
from lightning_3d.config.values import accepts
from lightning_3d.errors import ConfigError
from lightning_3d.planning.partition import StageLoad, additive, least_greatest_load, partition
from lightning_3d.planning.schedule_order import Computation, schedule_order
from lightning_3d.zero.buckets import make_buckets
from lightning_3d.zero.offload.windows import Part, deal
from lightning_3d.zero.shard import RankShard

SHAPES = st.lists(st.integers(0, 5), max_size=3).map(tuple)


# ------------------------------------------------------------------------------------------------------------- buckets


class _Replicas:
    """Ranks in one process: what each has sent is summed when one waits for it, after all have begun."""

    def __init__(self, rank: int, sent: list[list[Tensor]]) -> None:
        self.size = self.num_shards = len(sent)
        self._rank, self._sent = rank, sent

    def _summed(self, tensor: Tensor, row: Callable[[Tensor], Tensor]) -> Callable[[], Tensor]:
        index = len(self._sent[self._rank])
        self._sent[self._rank].append(tensor.clone())
        return lambda: row(torch.stack([tensors[index] for tensors in self._sent]).sum(0))

    def all_reduce(self, tensor: Tensor) -> Callable[[], Tensor]:
        return self._summed(tensor, lambda total: total.flatten())

    def reduce_scatter(self, tensor: Tensor) -> Callable[[], Tensor]:
        return self._summed(tensor, lambda total: total[self._rank])

    def reduce(self, tensor: Tensor, owner: int) -> Callable[[], Tensor]:
        return self._summed(tensor, lambda total: total[0] if owner == self._rank else tensor[0])


@settings(deadline=None)
@given(st.data())
def test_buckets_give_each_rank_its_rows_of_the_mean(data: st.DataObject) -> None:
    size = data.draw(st.integers(1, 3))
    rows = st.tuples(
        SHAPES, st.sampled_from([torch.float32, torch.float64]), st.sampled_from(["dealt", "whole", "owned"])
    )
    drawn = data.draw(st.lists(rows, min_size=1, max_size=6))
    has = data.draw(
        st.lists(st.lists(st.booleans(), min_size=len(drawn), max_size=len(drawn)), min_size=size, max_size=size)
    )
    num_bytes, sent = data.draw(st.integers(1, 400)), [list[Tensor]() for _ in range(size)]
    parameters = [nn.Parameter(torch.empty(shape, dtype=dtype)) for shape, dtype, _ in drawn]
    gradients = [
        [torch.arange(p.numel()).view_as(p).to(p) + i + 10 * r for i, p in enumerate(parameters)] for r in range(size)
    ]
    buckets = []
    for rank in range(size):
        shards = [
            RankShard(
                parameter=parameter,
                size=1 if how == "whole" or not parameter.dim() else size,
                rank=rank,
                owner=index % size if how == "owned" and parameter.dim() else None,
            )
            for index, (parameter, (_, _, how)) in enumerate(zip(parameters, drawn, strict=True))
        ]
        replicas: Any = _Replicas(rank, sent)
        buckets.append(make_buckets(shards, replicas, num_bytes=num_bytes, dtype=None, compression=lambda _: None))
        for bucket in buckets[-1]:
            for at, parameter in enumerate(bucket.parameters):
                index = next(i for i, own in enumerate(parameters) if own is parameter)
                if has[rank][index]:
                    bucket.fill(at, gradients[rank][index])
            bucket.launch()
    for rank in range(size):
        dealt = [id(parameter) for bucket in buckets[rank] for parameter in bucket.parameters]
        assert sorted(dealt) == sorted(map(id, parameters))
        assert all(sum(p.nbytes for p in bucket.parameters[:-1]) < num_bytes for bucket in buckets[rank])
        found = {id(shard.parameter): (shard, own) for bucket in buckets[rank] for shard, own in bucket.collect()}
        for index, parameter in enumerate(parameters):
            given_by = [gradients[r][index] for r in range(size) if has[r][index]]
            assert (id(parameter) in found) == bool(given_by)
            if given_by:
                shard, own = found[id(parameter)]
                torch.testing.assert_close(own.flatten(), shard.own(sum(given_by) / size).flatten())


# ------------------------------------------------------------------------------------------------------------- windows


@given(st.lists(SHAPES, max_size=6), st.integers(0, 200), st.booleans())
def test_windows_have_every_row_once_and_are_bounded(shapes: list[Any], num_bytes: int, by_rows: bool) -> None:
    values = [
        nn.Parameter(torch.arange(torch.Size(shape).numel(), dtype=torch.float32).view(shape)) for shape in shapes
    ]
    parts = [Part(parameter=value, values=value, gradient=value.detach(), group=0) for value in values]
    windows = deal(parts, num_bytes, by_rows=by_rows)
    pieces = list(chain(*windows))
    assert len(windows) == 1 or all(windows)
    assert list(dict.fromkeys(id(piece.part) for piece in pieces)) == list(map(id, parts))
    for part in parts:
        own = [piece for piece in pieces if piece.part is part]
        assert torch.equal(torch.cat([piece.values.flatten() for piece in own]), part.values.flatten())
        assert [piece.is_last for piece in own] == [False] * (len(own) - 1) + [True]
    for window in windows:
        is_one = len(window) == 1 and (not by_rows or sum(window[0].values.shape[:1]) <= 1)
        assert is_one or sum(piece.values.nbytes for piece in window) <= num_bytes


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


# -------------------------------------------------------------------------------------------------------------- config

JUNK = st.one_of(
    st.none(), st.booleans(), st.integers(-3, 3), st.floats(), st.text(max_size=4), st.just([1]), st.just({})
)


def _values(annotation: Any) -> st.SearchStrategy[Any]:
    """Values that an annotation allows."""
    origin, args = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return st.integers(args[1].minimum, 9) if args[0] is int else st.floats(args[1].minimum, 9)
    if origin in (Union, UnionType):
        return st.one_of(*map(_values, args))
    if origin is Literal:
        return st.sampled_from(args)
    if origin is tuple:
        return st.just(())
    simple = {
        int: st.integers(0, 9),
        float: st.floats(0, 9),
        bool: st.booleans(),
        str: st.just("auto"),
        type(None): st.none(),
    }
    return simple[annotation]


def _hints(section: type) -> dict[str, Any]:
    hints = get_type_hints(section, include_extras=True)
    return {field.name: hints[field.name] for field in fields(section) if get_origin(hints[field.name]) is not ClassVar}


def _given_for(section: type) -> st.SearchStrategy[dict[str, Any]]:
    return st.fixed_dictionaries(
        {}, optional={n: _given_for(h) if is_dataclass(h) else _values(h) for n, h in _hints(section).items()}
    )


def _is_within(given: Any, config: Any) -> bool:
    """Whether each setting is as given; None may leave a setting to the others, as a budget to ``recompute="auto"``."""
    if not isinstance(given, dict):
        return given is None or bool(given == config)
    return all(_is_within(value, config[name]) for name, value in given.items())


@settings(deadline=None, max_examples=25)
@example({"activations": {"recompute": "auto", "budget": None}})
@given(_given_for(ThreeDConfig))
def test_a_config_is_what_it_was_given_and_goes_through_yaml(mapping: dict[str, Any]) -> None:
    try:
        config = ThreeDConfig.from_mapping(mapping)
    except ConfigError:  # settings that contradict each other
        assume(False)
    assert _is_within(mapping, asdict(config))
    text = OmegaConf.to_yaml(OmegaConf.create(asdict(config)))
    assert ThreeDConfig.from_mapping(OmegaConf.create(text)) == config


SECTIONS = [(name, hint) for name, hint in _hints(ThreeDConfig).items() if is_dataclass(hint)]


@settings(deadline=None)
@given(st.sampled_from(SECTIONS), st.data())
def test_what_a_key_does_not_allow_is_refused(section: tuple[str, type], data: st.DataObject) -> None:
    name, value = data.draw(st.sampled_from(sorted(hints := _hints(section[1])))), data.draw(JUNK)
    assume(value != [1])  # a list is taken for a tuple
    if not accepts(hints[name], value):
        with pytest.raises(ConfigError, match=name):
            ThreeDConfig.from_mapping({section[0]: {name: value}})


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
