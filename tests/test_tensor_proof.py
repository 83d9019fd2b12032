"""A planned block that differs from its dense self is replicated; one that takes no slices is planned without them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses import FakeTensor
from torch.distributed.device_mesh import init_device_mesh

from lightning_3d.planning.plan import Plan
from lightning_3d.sharding.rules import losses
from lightning_3d.sharding.sharded_tensor import ShardedTensor
from lightning_3d.tensor import Verification, plan_block, verify, verify_block
from tests.law.models.tensor import Penalized
from tests.models import Block, TinyGPT, tokens
from tests.parity import Job, Layout, assert_parity, plan_text, run_layout
from tests.workers import WorkerPools


class PlainOnly(Block):
    """Like a block that calls a kernel of its own, it takes plain tensors alone; slices of a sequence are not."""

    def forward(self, x: Tensor) -> Tensor:
        if type(x) not in (Tensor, FakeTensor):
            raise TypeError(f"the kernel does not take a {type(x).__name__}")
        return super().forward(x)


class Particular(Block):
    """It takes small numbers alone, which random inputs are not."""

    def forward(self, x: Tensor) -> Tensor:
        if not torch.compiler.is_compiling() and x.isnan().any().logical_or(x.abs().max() > 2.5):
            raise ValueError("not near 0")
        return super().forward(x)


class Different(Block):
    """It computes something else once its weights are sharded, if its flag says so."""

    def __init__(self, *, is_different: bool) -> None:
        super().__init__(32, 4)
        self.is_different = is_different

    def forward(self, x: Tensor) -> Tensor:
        is_sharded = isinstance(self.attention.q.weight, ShardedTensor)
        return super().forward(x) * (1.01 if self.is_different and is_sharded else 1.0)


class Odd(TinyGPT):
    """One of each, and a block that differs from another in its flag alone."""

    def __init__(self) -> None:
        super().__init__()
        nn.init.normal_(self.positions.weight, std=0.1)
        flagged = [Different(is_different=flag) for flag in (True, False)]
        self.blocks = nn.ModuleList([Particular(32, 4), *flagged, PlainOnly(32, 4)])


def _plans(plan: Plan | None) -> list[Any]:
    assert plan is not None
    return [block.tensor for block in plan.blocks if block.fqn.startswith("blocks.")]


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_what_differs_is_left_whole_or_without_slices(workers: WorkerPools, sequence_parallel: bool) -> None:
    job = Job(model=Odd)
    ranks = run_layout(workers, job, Layout(tp=2, sequence_parallel=sequence_parallel))
    assert_parity(job, ranks)
    plans = _plans(ranks[0].plan)
    assert [plan.is_sharded for plan in plans] == [False, False, True, True]
    assert "relative difference of outputs 1.0e-02" in plans[1].reason
    assert [plan.is_sequence_parallel for plan in plans[2:]] == [sequence_parallel, False]
    assert plans[3].num_all_reduces_forward == plans[3].num_all_reduces_backward == 2
    told = {text.split(" is left out")[0]: text for text in ranks[0].warned if "left out of blocks" in text}
    assert "not near 0" in told["Tensor parallel"]
    assert ("Sequence parallelism" in told) == sequence_parallel
    if sequence_parallel:
        assert "% of the parameters sharded" in told["Sequence parallelism"]


def _made(model: TinyGPT, length: int) -> list[tuple[str, bool, str]]:
    """The collectives of a block, by kind and call."""
    example = torch.randn(2, length, 32, requires_grad=True)
    plan = plan_block(model.blocks[0], (example,), {}, size=2, sequence_parallel=True)
    return [(made.kind, made.is_backward, made.call) for made in plan.collectives]


def test_sequences_that_ranks_do_not_divide_are_cut_unevenly(workers: WorkerPools) -> None:
    job = Job(model=partial(TinyGPT, context=15), data=partial(tokens, context=15))
    ranks = run_layout(workers, job, Layout(tp=2, sequence_parallel=True))
    assert_parity(job, ranks)
    assert ", sequence parallel, " in plan_text(ranks[0].plan)
    assert not [text for text in ranks[0].warned if "Sequence parallelism is left out of blocks" in text]
    of_odd, of_even = (_made(TinyGPT(context=16), length) for length in (15, 16))
    assert of_odd == of_even
    assert {kind for kind, is_backward, _ in of_odd if not is_backward} == {"all-gather", "reduce-scatter"}


def test_gradients_of_gradients_go_through_slices(workers: WorkerPools) -> None:
    job = Job(model=Penalized)
    ranks = run_layout(workers, job, Layout(tp=2, sequence_parallel=True))
    assert_parity(job, ranks)
    assert all(plan.is_sequence_parallel for plan in _plans(ranks[0].plan))


def test_proof_can_be_left_out(workers: WorkerPools) -> None:
    first, _ = run_layout(workers, Job(model=Odd), Layout(tp=2, verify=False))
    assert not [text for text in first.warned if "left out of blocks" in text]
    assert [plan.is_sharded for plan in _plans(first.plan)] == [True] * 4


class Ending(nn.Module):
    """Ends in a mean cross entropy over rows that lie in slices of the sequence: 33 classes can't be shared out."""

    def __init__(self) -> None:
        super().__init__()
        self.mlp = nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16))
        self.head = nn.Linear(16, 33, bias=False)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.head(x + self.mlp(x)).flatten(0, 1), labels.flatten())


def _proved_losses() -> list[tuple[bool, Verification]]:
    """Whether a plan has slices of the sequence, and its proof: as it is, and with a count of all labels."""
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    block, x = Ending(), torch.randn(1, 8, 16, requires_grad=True)
    labels = torch.arange(8).masked_fill(torch.arange(8) < 3, -100)[None]
    proofs = []
    for is_planted, seen in ((False, labels), (True, labels), (True, labels.to("meta"))):
        with pytest.MonkeyPatch.context() as patch:
            if is_planted:
                patch.setattr(losses, "_count", lambda *, target, **_: target.numel())
            plan = plan_block(block, (x, labels), {}, size=2, sequence_parallel=True)
            proof = verify_block(block, plan, (x.detach().to("meta").requires_grad_(), seen), {}, mesh)
            of_loss = [collective.kind for collective in plan.collectives if collective.call == "cross_entropy"]
            assert set(of_loss) <= {"all-reduce"}, "rows are gathered"
            proofs.append((plan.is_sequence_parallel, proof))
    return proofs


def test_labels_of_the_batch_show_a_wrong_count(workers: WorkerPools) -> None:
    for proofs in workers(2).run(_proved_losses):
        assert [is_along for is_along, _ in proofs] == [True] * 3
        assert [proof.passed for _, proof in proofs] == [True, False, True], "labels that are alike show nothing"
        assert proofs[1][1].error is None, "it is another number that was found"


class Halves(Block):
    """Has a buffer of 16 bits, and fails where it is told to."""

    def __init__(self) -> None:
        super().__init__(32, 4)
        self.register_buffer("scale", torch.ones(32, dtype=torch.bfloat16))
        self.fails_if: type[Tensor] | None = None

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        if self.fails_if is not None and isinstance(self.attention.q.weight, self.fails_if):
            raise MemoryError("here alone")
        return x * self.scale


def _raise(*args: Any, **kwargs: Any) -> None:
    raise MemoryError("here alone")


@contextmanager
def _raise_on_entry(block: nn.Module) -> Iterator[None]:
    _raise()
    yield


def _proofs_of_failing(places: tuple[str, ...]) -> list[tuple[str, bool, torch.dtype, bool]]:
    """What proofs come to in which rank 1 fails, and how they leave the block."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    x, found = torch.randn(2, 4, 32, requires_grad=True), []
    for place in places:
        torch.manual_seed(0)
        block = Halves()
        plan = plan_block(block, (x,), {}, size=2)
        assert plan.is_sharded
        with pytest.MonkeyPatch.context() as patch:
            if dist.get_rank() == 1:
                if place in ("dense", "sharded"):
                    block.fails_if = nn.Parameter if place == "dense" else ShardedTensor
                else:
                    is_context = place in ("preserved", "in_fp32")
                    patch.setattr(verify, place, _raise_on_entry if is_context else _raise)
            proof = verify_block(block, plan, (x,), {}, mesh)
        found.append((str(proof.error), proof.passed, block.scale.dtype, block.training))
    return found


def test_a_rank_that_fails_alone_in_a_proof_fails_it_on_all(workers: WorkerPools) -> None:
    places = ("preserved", "in_fp32", "dense", "sharded", "apply_block", "difference")
    left = ("MemoryError: here alone", False, torch.bfloat16, True)
    assert workers(2).run(_proofs_of_failing, places, timeout=60) == [[left] * len(places)] * 2
