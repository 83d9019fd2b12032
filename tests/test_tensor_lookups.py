"""Calls that are answered without a decision of their own get the answer that such a decision would give."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_3d.sharding.placement import Shard, Sharded, in_parts
from lightning_3d.sharding.rules import generic, views
from lightning_3d.sharding.rules.call import LocalCall, TorchCall
from lightning_3d.sharding.rules.function import function_name
from lightning_3d.sharding.rules.local_form import local_form
from lightning_3d.sharding.sharded_tensor import ShardedTensor
from lightning_3d.tensor import plan_block
from lightning_3d.tensor.plan.planned_axis import PlannedAxis

AXIS = PlannedAxis(2)
SHARD, PARTS = Shard(1), in_parts(1, (2, 4), 2)
INDICES: list[Any] = [
    (0,),
    (slice(None), slice(None), 1),
    (..., 2, slice(None, 3)),
    (None, 1),
    (..., None),
    (slice(0, 2),),
]


def _sharded(at: Sharded, *shape: int) -> Tensor:
    local = torch.empty([length // 2 if dim == at.dim else length for dim, length in enumerate(shape)])
    return ShardedTensor(local, AXIS, at)


def _call(function: Callable[..., object], *args: object) -> TorchCall:
    return TorchCall(function, function_name(function), args, {})


def _said(answer: LocalCall | None) -> object:
    return None if answer is None else (answer.input_placements, answer.result)


@pytest.mark.parametrize("at", [SHARD, PARTS])
def test_basic_indices_beside_the_sharded_dim(at: Sharded) -> None:
    for index in INDICES:
        call = _call(Tensor.__getitem__, _sharded(at, 4, 6, 5, 7), index)
        expected = _said(generic.generic(call, AXIS))
        made = _said(views.take_beside(call, AXIS))
        assert made is not None, index
        assert isinstance(expected, tuple), index
        assert made == (expected[0], expected[1][0]), index
    others: list[Any] = [(slice(None), 0), (..., slice(0, 2), slice(None), slice(None)), (torch.tensor([0]),), (True,)]
    for index in others:
        assert views.take_beside(_call(Tensor.__getitem__, _sharded(at, 4, 6, 5, 7), index), AXIS) is None, index


@pytest.mark.parametrize("at", [SHARD, PARTS])
def test_values_set_beside_the_sharded_dim(at: Sharded) -> None:
    index = (..., 2, slice(None, 3))  # (4, 6, 3)
    for value in (_sharded(at, 4, 6, 3), _sharded(at, 4, 6, 1)):
        call = _call(Tensor.__setitem__, _sharded(at, 4, 6, 5, 7), index, value)
        expected, made = generic.generic(call, AXIS), views.set_beside(call, AXIS)
        assert expected is not None
        assert made is not None
        assert made.input_placements == expected.input_placements
    for other in (1.0, torch.empty(6, 3), _sharded(Shard(0), 4, 6, 3)):
        assert views.set_beside(_call(Tensor.__setitem__, _sharded(at, 4, 6, 5, 7), index, other), AXIS) is None


@pytest.mark.parametrize("at", [SHARD, PARTS])
def test_lengths_do_not_matter(at: Sharded, monkeypatch: pytest.MonkeyPatch) -> None:
    x, same = _sharded(at, 4, 6, 5), _sharded(at, 4, 6, 5)
    others = (
        same,
        torch.empty(6, 5),
        torch.empty(4, 1, 5),
        torch.empty(5),
        torch.empty(4, 6, 1),
        _sharded(at, 4, 6, 1),
    )
    calls = [
        _call(function, x, other) for function in (torch.add, Tensor.mul, torch.sub, Tensor.add_) for other in others
    ]
    calls += [
        _call(torch.where, torch.empty(6, 5, dtype=torch.bool), x, same),
        _call(torch.add, x, _sharded(Shard(2), 4, 6, 8)),
    ]
    calls += [_call(torch.sum, x, dim) for dim in (0, 1, -1)] + [_call(torch.mean, x, dim) for dim in (0, 1)]
    calls += [_call(Tensor.unsqueeze, x, -1), _call(torch.softmax, x, 1), _call(torch.softmax, x, 2)]
    calls += [_call(Tensor.transpose, x, 1, 2), _call(Tensor.clone, x), _call(Tensor.to, x, torch.bfloat16)]
    said = [_said(generic.generic(call, AXIS)) for call in calls]
    monkeypatch.setattr(generic, "_OF_ANY_LENGTHS", frozenset())
    assert said == [_said(generic.generic(call, AXIS)) for call in calls]
    assert None in said
    assert len(set(map(repr, said))) > 6


class _Chunks(nn.Module):
    """Goes over the positions of a chunk, each with those before it, as linear attention does."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 8 * 24), nn.Linear(8 * 24, 8)

    def forward(self, x: Tensor) -> Tensor:
        seen = self.up(x).unflatten(-1, (8, 24)).transpose(1, 2)  # batch, heads, positions, 24
        for i in range(1, 24):
            row = seen[..., i, :i].clone()
            seen[..., i, :i] = row + (row.unsqueeze(-1) * seen[..., :i, :i].clone()).sum(-2)
        made: Tensor = self.down(seen.transpose(1, 2).flatten(2))
        return made


def test_a_loop_over_positions_is_decided_once() -> None:
    local_form.cache_clear()
    plan = plan_block(_Chunks(), (torch.empty(3, 24, 8),), {}, size=2)
    assert [weight.role for weight in plan.weights] == ["column", "column", "row", "replicate"]
    assert local_form.cache_info().misses < 40
