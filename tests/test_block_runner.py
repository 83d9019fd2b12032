"""The one patch of a block: what it may not change for the author's code, and that it comes off."""

from __future__ import annotations

import inspect
import pickle
from copy import deepcopy
from functools import partial
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.utils.checkpoint import checkpoint

from lightning_3d.model.block_runner import own_forward, runner_of, running
from lightning_3d.trace.attributes import AttributeGuards
from lightning_3d.trace.interception import routed
from tests.models import TinyMLP, features, loader
from tests.parity import Layout
from tests.workers import WorkerPools

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


def test_the_authors_code_sees_its_own_class() -> None:
    block = Derived()
    with routed({"block": block}):
        assert type(block) is Derived
        assert isinstance(block, Base)
        assert inspect.signature(block.forward) == inspect.signature(Derived().forward)
        assert own_forward(block) == Derived.forward.__get__(block)


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


def test_a_forward_and_a_compilation_that_others_set_on_the_block_stay() -> None:
    block = Base()
    own = block.forward
    block.forward = lambda x: own(x) + 10  # type: ignore[method-assign]
    block.compile(backend="eager")
    expected, before = block(_input()), dict(vars(block))
    with routed({"block": block}):
        torch.testing.assert_close(block(_input()), expected)
        torch.testing.assert_close(block.forward(_input()), expected)
        assert torch.equal(own_forward(block)(_input()), expected)
    assert {**vars(block), "num_calls": 0} == {**before, "num_calls": 0}


def test_a_compiler_follows_calls_in_glue() -> None:
    block = Derived()

    def glue(x: Tensor) -> Tensor:
        y: Tensor = block(x).relu() + block.forward(x)
        return y

    with routed({"block": block}):
        compiled = torch.compile(glue, backend="eager", fullgraph=True)
        torch.testing.assert_close(compiled(_input()), glue(_input()))


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


@pytest.mark.parametrize("fails", [False, True])
def test_nothing_stays_of_a_route(fails: bool) -> None:
    blocks = {"a": Derived(), "b": Base()}
    before = {fqn: dict(vars(block)) for fqn, block in blocks.items()}
    try:
        with routed(blocks):
            assert all(runner_of(block) is not None for block in blocks.values())
            if fails:
                raise ValueError("out of tune")
    except ValueError:
        assert fails
    assert {fqn: vars(block) for fqn, block in blocks.items()} == before


def test_what_others_wrap_around_it_stays() -> None:
    block = Base()
    with routed({"block": block}):
        runner = block.forward
        block.forward = lambda x: runner(x) + 10  # type: ignore[method-assign]
    torch.testing.assert_close(block(_input()), Base.forward(block, _input()) + 10)
    with routed({"block": block}):
        torch.testing.assert_close(block(_input()), Base.forward(block, _input()) + 10)
    del block.forward
    assert "forward" not in vars(block)


def test_a_block_is_routed_once() -> None:
    block = Base()
    with routed({"block": block}):
        with pytest.raises(AssertionError, match="block is routed already"), routed({"block": block}):
            pass
        assert runner_of(block) is not None, "the outer route stays"
    assert runner_of(block) is None


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


# ------------------------------------------------------------------------------------------------------------ FSDP2


class Appending(Base):
    """Changes a list among its arguments, which FSDP2's hooks copy."""

    def forward(self, x: Tensor, seen: list[Tensor]) -> Tensor:  # type: ignore[override]
        y = super().forward(x)
        seen.append(y)
        return y


def _with_fsdp(*, patched_first: bool) -> None:
    torch.manual_seed(0)
    block, mesh = Appending(), init_device_mesh("cpu", (2,))
    expected = deepcopy(block)(_input(), [])
    if patched_first:
        running(block)
    fully_shard(block, mesh=mesh)
    with routed({"block": block}):
        assert type(block).__name__ == "FSDPAppending"
        seen: list[Tensor] = []
        output = block(_input(), seen)
        output.sum().backward()
    torch.testing.assert_close(output, expected)
    torch.testing.assert_close(seen, [expected])
    runner = runner_of(block)
    assert runner is not None, "its weights stay sharded"
    assert runner.route is None
    block(_input(), seen)
    assert len(seen) == 2


@pytest.mark.parametrize("patched_first", [False, True])
def test_it_composes_with_fsdp(workers: WorkerPools, patched_first: bool) -> None:
    workers(2).run(partial(_with_fsdp, patched_first=patched_first))


# ------------------------------------------------------------------------------------------------------- after a run


class Counting(nn.Linear):
    """Its forward changes an attribute, which is guarded where the block is absent."""

    def __init__(self, size: int) -> None:
        super().__init__(size, size)
        self.num_calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.num_calls += 1
        return super().forward(x)


class Model(TinyMLP):
    """TinyMLP with such blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 16), Counting(16), Counting(16), nn.Linear(16, 4))


class Fails(L.Callback):
    """Raises after the first batch."""

    def on_train_batch_end(self, *args: Any, **kwargs: Any) -> None:
        raise ValueError("out of tune")


def _patches_after_a_run(layout: Layout, *, fails: bool) -> None:
    model, data = Model(), loader(features(16), global_batch_size=8, data_parallel_size=layout.dp)
    before = {fqn: (type(inner), vars(inner).keys()) for fqn, inner in model.named_modules()}
    trainer = L.Trainer(
        accelerator="cpu",
        devices=layout.world_size,
        strategy=layout.strategy(),
        max_epochs=1,
        barebones=True,
        callbacks=[Fails()] if fails else [],
    )
    try:
        trainer.fit(model, data)
    except ValueError:
        assert fails
    strategy: Any = trainer.strategy
    sharded = {block.fqn for block in strategy.plan.blocks if block.tensor is not None and block.tensor.is_sharded}
    for fqn in (block.fqn for block in strategy.plan.blocks):
        block = model.get_submodule(fqn)
        runner = runner_of(block)
        assert runner is None or runner.route is None
        needs_one = layout.pp > 1 or fqn in sharded or (layout.dp > 1 and layout.zero == 3)
        assert (runner is not None) == needs_one, f"{fqn} of {layout}"
        cls, names = before[fqn]
        assert type(block) is cls or isinstance(block, FSDPModule)
        if not needs_one:
            assert vars(block).keys() == names
    if layout.pp == 1:
        model(torch.randn(2, 8)).sum().backward()
    if not fails:
        trainer.fit_loop.max_epochs = 2
        trainer.fit(model, data)
        trainer.validate(model, data, verbose=False)
        assert trainer.current_epoch == 2


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("layout", [Layout(pp=2), Layout(tp=2), Layout(dp=2), Layout(dp=2, zero=3), Layout()], ids=str)
def test_blocks_are_as_their_weights_need_them_after_a_run(workers: WorkerPools, layout: Layout, fails: bool) -> None:
    workers(layout.world_size).run(partial(_patches_after_a_run, layout, fails=fails))
