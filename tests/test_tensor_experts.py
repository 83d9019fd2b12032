"""Mixtures of experts: weights picked by index, products per expert, routing that reads data."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.overrides import TorchFunctionMode

from lightning_3d.tensor import BlockTensorPlan, apply_block, plan_block
from lightning_3d.tensor.placement import Parts
from lightning_3d.tensor.rules.aliases import AliasDims, alias_dims
from lightning_3d.tensor.rules.call import Call
from lightning_3d.tensor.rules.function import function_name
from lightning_3d.tensor.rules.partial_sums import is_linear_in
from tests.law.models.experts import (
    HIDDEN,
    WIDTH,
    Gated,
    Modules,
    Scattered,
    Stacked,
    TopTwo,
    added,
    by_einsum,
    by_group,
    by_mask,
    by_number,
    by_selection,
    by_transpose,
    changed_in_place,
)
from tests.test_tensor_plan import tokens
from tests.workers import WorkerPools


def _plan(block: nn.Module, size: int = 2) -> BlockTensorPlan:
    return plan_block(block, (tokens(WIDTH),), {}, size=size)


@pytest.mark.parametrize(
    ("call", "dims"),
    [
        (lambda w: w[1], (1, 2)),
        (lambda w: w[-1, ...], (1, 2)),
        (lambda w: w[torch.tensor(1)], (1, 2)),
        (lambda w: w[torch.tensor([1, 0]), :], (None, 1, 2)),
        (lambda w: w[[2, 0]], (None, 1, 2)),
        (lambda w: w[torch.zeros(4, 2, dtype=torch.int64)], (None, None, 1, 2)),
        (lambda w: w[1:2], (None, 1, 2)),
        (lambda w: w.select(0, 1), (1, 2)),
        (lambda w: w.unbind()[0], (1, 2)),
        (lambda w: w.index_select(index=torch.tensor([1]), dim=0), (None, 1, 2)),
        (lambda w: w.split(1)[0], (None, 1, 2)),
        (lambda w: w.narrow(0, 0, 1), (None, 1, 2)),
        (lambda w: w.mT, (0, 2, 1)),
        (lambda w: w.transpose(-2, -1), (0, 2, 1)),
        (lambda w: w.permute(2, 0, 1), (2, 0, 1)),
        (lambda w: w.to(torch.float64), (0, 1, 2)),
        (lambda w: w[:, 1], None),
        (lambda w: w[..., 0], None),
        (lambda w: w[torch.tensor([True, False, True])], None),
        (lambda w: w[None], None),
        (lambda w: w.select(1, 0), None),
        (lambda w: w.unbind(-1)[0], None),
        (lambda w: w * 2, None),
    ],
)
def test_calls_that_make_aliases(call: Callable[[Tensor], Tensor], dims: tuple[int | None, ...] | None) -> None:
    weight = torch.arange(3 * 4 * 5.0).view(3, 4, 5)
    with _CallsWith(weight) as mode:
        alias = call(weight)
    assert alias_dims(mode.seen[0]) == dims
    if dims is not None:
        assert [length for length, dim in zip(alias.shape, dims, strict=True) if dim is not None] == [
            weight.shape[dim] for dim in dims if dim is not None
        ]


def test_slices_of_two_dimensional_weights_are_no_aliases() -> None:
    def dims(name: str, *args: object) -> AliasDims | None:
        return alias_dims(Call(getattr(Tensor, name), name, args, {}))

    assert dims("__getitem__", torch.empty(4, 2), slice(2)) is None
    assert dims("chunk", torch.empty(4, 2), 2) is None
    assert dims("__getitem__", torch.empty(4, 2), 1) == (1,)
    assert dims("__getitem__", torch.empty(4), 1) is None


def counts(plan: BlockTensorPlan) -> tuple[int, int, int]:
    return plan.num_all_reduces_forward, plan.num_all_reduces_backward, plan.num_other_collectives_forward


EXPERTS: list[tuple[nn.Module, tuple[int, int, int]]] = [
    *((Stacked(run), (3, 1, 0)) for run in (by_number, by_transpose)),
    *((Stacked(run), (1, 1, 0)) for run in (by_selection, by_einsum, by_group)),
    (Stacked(by_mask), (4, 4, 0)),  # as if every expert were hit, and the one that marks padding
    *((Gated(is_interleaved), (1, 1, 0)) for is_interleaved in (False, True)),
    (Modules(), (3, 3, 0)),
    (Gated(False, hidden=8), (0, 2, 2)),  # narrow ones are sharded whatever they send
    (TopTwo(added), (1, 2, 0)),
]


@pytest.mark.parametrize(("block", "expected"), EXPERTS)
def test_experts_are_sharded(block: nn.Module, expected: tuple[int, int, int]) -> None:
    plan = _plan(block)
    assert counts(plan) == expected, str(plan)
    assert plan.sharded_share > 0.9, str(plan)


def test_a_router_whose_logits_are_changed_in_place_is_replicated() -> None:
    plan = _plan(Scattered())
    assert plan.weight("gate.weight").reason == "scatter_ changes its output in place and has no sharded form"
    assert plan.weight("up.weight").role == "column"


def test_gate_and_up_in_one_weight_are_parts() -> None:
    plan = _plan(Gated(False))
    halves = Parts(dim=1, sizes=(HIDDEN, HIDDEN), num_ranks=2)
    assert (plan.weight("gate_up").parts, plan.weight("gate_up_bias").parts) == (halves, halves)
    assert _plan(Gated(True)).weight("gate_up").parts is None


@pytest.mark.parametrize("size", [2, 4])
def test_sums_of_narrow_experts_are_reduced_late(size: int) -> None:
    plan = _plan(TopTwo(added), size)
    assert plan.defers_sums
    reduced = 2 * tokens(WIDTH).numel() * 4 * (size - 1) // size
    assert [made.num_bytes for made in plan.collectives if not made.is_backward] == [reduced]  # not twice as much
    changed = _plan(TopTwo(changed_in_place))
    assert changed.is_sharded
    assert not changed.defers_sums


@pytest.mark.parametrize(
    ("call", "keeps"),
    [
        (lambda y, w: y * w[:, :1], True),
        (lambda y, w: w * y, True),
        (lambda y, w: 2.0 * y, True),
        (lambda y, w: y.sum(0), True),
        (lambda y, w: y.view(2, 2, 3), True),
        (lambda y, w: y.transpose(0, 1), True),
        (lambda y, w: y[torch.tensor([3, 1, 0, 2])], True),
        (lambda y, w: y.to(torch.float32), True),
        (lambda y, w: y * y, False),
        (lambda y, w: y * w[None], False),
        (lambda y, w: y * w.double(), False),
        (lambda y, w: y + w, False),
        (lambda y, w: y + 1, False),
        (lambda y, w: y.mul_(2), False),
        (lambda y, w: y.sum(), False),
        (lambda y, w: y.sum(0, dtype=torch.float64), False),
        (lambda y, w: y.to(torch.float64), False),
        (lambda y, w: y.view(torch.int32), False),
        (lambda y, w: y[torch.tensor([True, False, True, True])], False),
        (lambda y, w: y[torch.tensor([0, 1])], False),
        (lambda y, w: y.relu(), False),
    ],
)
def test_calls_that_sums_wait_for(call: Callable[[Tensor, Tensor], Tensor], keeps: bool) -> None:
    y, w = torch.randn(4, 3), torch.randn(4, 3)
    with _CallsWith(y) as mode:
        call(y, w)
    assert is_linear_in(y, mode.seen[0]) is keeps


class _CallsWith(TorchFunctionMode):
    def __init__(self, tensor: Tensor) -> None:
        super().__init__()
        self.tensor, self.seen = tensor, list[Call]()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(arg is self.tensor for arg in args):
            self.seen.append(Call(func, function_name(func), args, kwargs or {}))
        return func(*args, **(kwargs or {}))


def _noisy_router(make: Callable[[], nn.Module]) -> list[Tensor]:
    """Output and gradients with experts that score alike, but for a rounding error on the last rank."""
    torch.manual_seed(0)
    block, args, kwargs = make(), (tokens(WIDTH),), {}
    with torch.no_grad():
        block.gate.weight[1:] = block.gate.weight[0]
    dense = copy.deepcopy(block)
    apply_block(block, plan_block(block, args, kwargs, size=2), init_device_mesh("cpu", (2,), mesh_dim_names=("tp",)))
    if dist.get_rank() == 1:
        gate = block.gate.weight.to_local()
        gate.data[1] += torch.finfo(torch.float32).eps * gate.data[1].abs()
    outputs = []
    for module in (dense, block):
        output = module(*args)
        output.sum().backward()
        outputs += [output.detach(), module.gate.weight.grad]
    expected, _, output, gradient = outputs
    torch.testing.assert_close(output, expected)
    return [output, gradient.to_local()]


@pytest.mark.parametrize("make", [*(partial(Stacked, run) for run in (by_mask, by_group, by_selection)), Modules])
def test_ranks_route_alike_where_their_scores_differ_by_rounding(workers: WorkerPools, make: Any) -> None:
    first, second = workers(2).run(_noisy_router, make, timeout=60)
    for own, other in zip(first, second, strict=True):
        torch.testing.assert_close(own, other)
