"""A planned block that differs from its dense self falls back: to a safer plan, else to replication."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensor

from lightning_3d.tensor.sharded_tensor import ShardedTensor
from tests.models import Block, TinyGPT
from tests.parity import Job, Layout, assert_parity, run_layout, run_reference
from tests.workers import WorkerPools


class PlainOnly(Block):
    """Like a block that calls a kernel of its own, it takes plain tensors alone; slices of a sequence are not."""

    def forward(self, x: Tensor) -> Tensor:
        if type(x) not in (Tensor, FakeTensor):
            raise TypeError(f"the kernel does not take a {type(x).__name__}")
        return super().forward(x)


class Different(Block):
    """It computes something else once its weights are sharded."""

    def forward(self, x: Tensor) -> Tensor:
        scale = 1.01 if isinstance(self.attention.q.weight, ShardedTensor) else 1.0
        return super().forward(x) * scale


class SometimesDifferent(Block):
    """Like ``Different``, if its flag says so."""

    def __init__(self, *, is_different: bool) -> None:
        super().__init__(32, 4)
        self.is_different = is_different

    def forward(self, x: Tensor) -> Tensor:
        is_sharded = isinstance(self.attention.q.weight, ShardedTensor)
        return super().forward(x) * (1.01 if self.is_different and is_sharded else 1.0)


class FlaggedGPT(TinyGPT):
    """TinyGPT of blocks that differ in their flag alone."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(SometimesDifferent(is_different=i == 1) for i in range(3))


class PlainGPT(TinyGPT):
    """TinyGPT of such blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(PlainOnly(32, 4) for _ in range(2))


class DifferentGPT(TinyGPT):
    """TinyGPT of such blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Different(32, 4) for _ in range(2))


def test_block_without_sequence_parallelism(workers: WorkerPools) -> None:
    job = Job(model=PlainGPT)
    result = run_layout(workers, job, Layout(tp=2, sequence_parallel=True))
    assert_parity(run_reference(job), result, tolerance=1e-5)
    for block in (block.tensor for block in result.plan.blocks if block.kind == PlainOnly.__name__):
        assert block is not None
        assert block.is_sharded
        assert not block.is_sequence_parallel
        assert block.num_all_reduces_forward == block.num_all_reduces_backward == 2
    (warned,) = [text for text in result.warnings if "left out of blocks" in text]
    assert warned.startswith("Sequence parallelism is left out of blocks whose sharding differs from dense: blocks.0: ")
    assert "the kernel does not take a ShardedTensor" in warned
    assert "% of the parameters sharded" in warned


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_block_without_tensor_parallelism(workers: WorkerPools, sequence_parallel: bool) -> None:
    job = Job(model=DifferentGPT)
    result = run_layout(workers, job, Layout(tp=2, sequence_parallel=sequence_parallel))
    assert_parity(run_reference(job), result, tolerance=1e-5)
    for block in (block.tensor for block in result.plan.blocks if block.kind == Different.__name__):
        assert block is not None
        assert not block.is_sharded
        assert block.reason is not None
        assert "relative difference of outputs 1.0e-02" in block.reason
    warned = [text.split(" is left out")[0] for text in result.warnings if "left out of blocks" in text]
    assert warned == ["Sequence parallelism", "Tensor parallel"][not sequence_parallel :]


def test_blocks_that_differ_in_a_flag_are_proved_apart(workers: WorkerPools) -> None:
    job = Job(model=FlaggedGPT)
    result = run_layout(workers, job, Layout(tp=2))
    assert_parity(run_reference(job), result, tolerance=1e-5)
    plans = {block.fqn: block.tensor for block in result.plan.blocks if block.kind == SometimesDifferent.__name__}
    assert {fqn: plan is not None and plan.is_sharded for fqn, plan in plans.items()} == {
        "blocks.0": True,
        "blocks.1": False,
        "blocks.2": True,
    }


def test_proof_can_be_left_out(workers: WorkerPools) -> None:
    job = Job(model=DifferentGPT)
    result = run_layout(workers, job, Layout(tp=2, verify=False))
    assert not [text for text in result.warnings if "left out of blocks" in text]
    losses = torch.tensor(result.numbers[0].losses)
    assert not torch.allclose(losses, torch.tensor(run_reference(job).numbers.losses), atol=1e-5)
