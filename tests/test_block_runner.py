"""The one patch of a block: what it may not change for the author's code, and that it comes off."""

from __future__ import annotations

import pickle
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_3d.model.block_runner import runner_of
from lightning_3d.trace.attributes import AttributeGuards
from lightning_3d.trace.interception import routed

WIDTH = 4


class Base(nn.Module):
    """What the block derives from."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.num_calls = 0

    def forward(self, x: Tensor, *, scale: float = 1.0) -> Tensor:
        self.num_calls += 1
        y: Tensor = self.linear(x) * scale
        return y


class Derived(Base):
    """Uses ``super()`` in its call and in its forward."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return super().__call__(*args, **kwargs) + 1

    def forward(self, x: Tensor, *, scale: float = 1.0) -> Tensor:
        return super().forward(x, scale=scale).tanh()


def _input() -> Tensor:
    return torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(0))


# ------------------------------------------------------------------------------------------------- transparency


def test_calls_go_on() -> None:
    block, seen = Derived(), []
    expected = block(_input(), scale=2.0)
    block.register_forward_pre_hook(lambda *args: seen.append("before"))
    block.register_forward_hook(lambda *args: seen.append("after"))
    with routed({"block": block}):
        torch.testing.assert_close(block(_input(), scale=2.0), expected)
        assert seen == ["before", "after"]
        torch.testing.assert_close(block.forward(_input(), scale=2.0) + 1, expected)
        assert seen == ["before", "after"]
        x = _input().requires_grad_()
        output = checkpoint(block, x, use_reentrant=False)
        output.sum().backward()
    torch.testing.assert_close(output, Derived.__call__(block, _input()))
    assert x.grad is not None
    assert block.num_calls == 6, "4 forwards here, 1 recomputed, 1 after"


@pytest.mark.parametrize("copied", [deepcopy, lambda block: pickle.loads(pickle.dumps(block))], ids=["copy", "pickle"])
def test_a_copy_belongs_to_no_step(copied: Any) -> None:
    block = Derived()
    with routed({"block": block}):
        copy = copied(block)
    runner = runner_of(copy)
    assert runner is not None
    assert runner.route is None
    assert runner.block is copy
    torch.testing.assert_close(copy(_input()), block(_input()))
    with torch.no_grad():
        copy.linear.weight.zero_()
    assert not torch.equal(copy(_input()), block(_input())), "it runs on its own weights"


# ---------------------------------------------------------------------------------------------------- it comes off


def test_guards_come_off() -> None:
    class Counter(Base):
        limit = 5

    block, guards = Counter(), AttributeGuards(lambda: False)
    guards.add("block", block, ["num_calls", "limit"])
    guards.add("block", block, ["num_calls", "linear.in_features"])
    assert type(block) is not Counter
    assert isinstance(block, Counter)
    assert block(_input()).shape == (3, WIDTH)
    assert (block.num_calls, block.limit) == (1, 5)
    block.limit = 6
    del block.limit
    assert block.limit == 5
    guards.remove()
    assert (type(block), type(block.linear)) == (Counter, nn.Linear)
    assert block.num_calls == 1
