"""Bugs that were found by attacking sharded blocks, each with its story in a line."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_3d.tensor import BlockTensorPlan, WeightPlan, apply_block
from lightning_3d.tensor.placement import Shard
from tests.test_tensor_apply import _mesh, _run, parity_of
from tests.workers import WorkerPools


class Between(nn.Module):
    """A column and a row weight, with a function of the hidden features between them."""

    def __init__(self, between: Callable[[Between, Tensor], Tensor]) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 32)
        self.between = between

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.down(self.between(self, x))
        return output


_SHARDED = {"up.weight": ("column", Shard(0)), "up.bias": ("column", Shard(0)), "down.weight": ("row", Shard(1))}


def _sharded_by_force(between: Callable[[Between, Tensor], Tensor]) -> None:
    torch.manual_seed(0)
    block, x = Between(between), torch.randn(2, 8, 32)
    dense, weights = copy.deepcopy(block), []
    for fqn, parameter in block.named_parameters():
        role, at = _SHARDED.get(fqn, ("replicated", None))
        weights.append(WeightPlan(fqn=fqn, shape=tuple(parameter.shape), role=role, sharding=at))  # type: ignore[arg-type]
    size = dist.get_world_size()
    apply_block(block, BlockTensorPlan(size=size, weights=tuple(weights)), _mesh(size))
    expected_loss, expected, _, _ = _run(dense, (dense, (x,), {}))
    loss, gradients, _, _ = _run(block, (block, (x,), {}))
    torch.testing.assert_close(loss, expected_loss, rtol=1e-5, atol=1e-4)
    assert gradients.keys() == expected.keys()
    for key, gradient in gradients.items():
        torch.testing.assert_close(gradient, expected[key], rtol=1e-4, atol=1e-4)


def _scanned(block: Between, x: Tensor) -> Tensor:
    return block.up(x).cumsum(-1)  # type: ignore[no-any-return]


def _biased_by_row(block: Between, x: Tensor) -> Tensor:
    rows = torch.arange(16.0)[:, None]
    return torch.addmm(rows, x.flatten(0, 1), block.up.weight.t()).view(2, 8, 64)


def _biased_by_number(block: Between, x: Tensor) -> Tensor:
    return torch.addmm(torch.tensor(2.0), x.flatten(0, 1), block.up.weight.t()).view(2, 8, 64)


@pytest.mark.parametrize(
    "between",
    [
        _scanned,  # every rank scanned its own features alone: torch 2.13's rule does not know dim -1
        _biased_by_row,  # one rank cut a bias of one column, the others failed
        _biased_by_number,
    ],
    ids=lambda between: between.__name__,
)
def test_equals_one_process(workers: WorkerPools, between: Callable[[Between, Tensor], Tensor]) -> None:
    workers(2).run(_sharded_by_force, between)


class Changed(Between):
    """With a residual, so that a sequence-parallel plan pays."""

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = super().forward(x) + x
        return self.down(self.between(self, y)) + y


def _zeroed_across_shards(block: Between, x: Tensor) -> Tensor:
    hidden: Tensor = block.up(x)
    hidden[..., :5].zero_()
    return hidden


def _viewed_then_changed(block: Between, x: Tensor) -> Tensor:
    hidden: Tensor = block.up(x)
    third = hidden[..., ::3]
    hidden.mul_(2)
    return hidden * third.sum()


def _read_without_gradient_first(block: Between, x: Tensor) -> Tensor:
    with torch.no_grad():
        scale = block.up(x).mean()
    return block.up(x) * scale  # type: ignore[no-any-return]


def _read_under_autocast_first(block: Between, x: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        block.up(x)
    return block.up(x)  # type: ignore[no-any-return]


def _planned(between: Callable[[Between, Tensor], Tensor], sequence_parallel: bool) -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 8, 32, requires_grad=True)
    parity_of((Changed(between), (x,), {}), sequence_parallel=sequence_parallel)


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize(
    "between",
    [
        _zeroed_across_shards,  # the zeros were written into a gathered copy
        _viewed_then_changed,  # the view of a gathered copy did not follow
        _read_without_gradient_first,  # the sequence that was gathered without gradient was read again with one
        _read_under_autocast_first,  # likewise one in bf16
    ],
    ids=lambda between: between.__name__,
)
def test_planned_equals_one_process(
    workers: WorkerPools, between: Callable[[Between, Tensor], Tensor], sequence_parallel: bool
) -> None:
    workers(2).run(_planned, between, sequence_parallel)
