"""Calls of a block's code on sharded tensors give what they give on full ones, or are refused; in one process."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_3d.errors import PlanError
from lightning_3d.sharding.interpret import Interpreter
from lightning_3d.sharding.placement import Shard
from lightning_3d.sharding.sharded_tensor import ShardedTensor
from lightning_3d.tensor.plan.planned_axis import PlannedAxis
from lightning_3d.tensor.sequence import GatheredSequence


def _sharded(*shape: int) -> tuple[ShardedTensor, Interpreter]:
    """A tensor that two ranks share along its last dim, and what answers calls with it."""
    axis = PlannedAxis(2)
    return ShardedTensor(torch.randn(*shape), axis, Shard(len(shape) - 1)), Interpreter(axis)


def test_an_index_of_true_is_not_one_of_one() -> None:
    x, interpreter = _sharded(2, 4)
    with interpreter:
        first, again = x[1], x[True]
    assert (first.shape, again.shape) == ((8,), (1, 2, 8)), "what was decided for 1 holds for 1"


def test_what_changes_its_shape_in_place_is_refused() -> None:
    x, interpreter = _sharded(2, 1, 4)
    with interpreter, pytest.raises(PlanError, match="squeeze_ changes a sharded tensor in place"):
        x.squeeze_(1)
    assert x.shape == (2, 1, 8)
    assert x.local.shape == (2, 1, 4)


@pytest.mark.parametrize("name", ["data_ptr", "untyped_storage", "__dlpack__"])
def test_the_memory_of_a_part_is_refused(name: str) -> None:
    x, interpreter = _sharded(2, 4)
    with interpreter, pytest.raises(PlanError, match=f"{name} asks for the memory of a tensor of which"):
        getattr(x, name)()


class _Summing(PlannedAxis):
    """An axis whose sums stay what this rank has of them."""

    def __init__(self, rank: int) -> None:
        super().__init__(2)
        self.rank = rank
        self.sums: list[torch.Size] = []

    def all_reduce(self, tensor: Tensor) -> Tensor:
        self.sums.append(tensor.shape)
        return tensor

    def all_gather(self, local: Tensor, at: Shard) -> Tensor:
        raise AssertionError("rows are gathered")


CLASSES = 5
WEIGHT = torch.linspace(0.5, 3, CLASSES)
LABELS = torch.tensor([[0, 3, -100, -100], [1, -100, 4, 2]])  # (B, T); the ranks' slices of T have unequal weights
NUMBERS = torch.linspace(0, 1, 2 * 4 * CLASSES).view(2, 4, CLASSES)

LOSSES: dict[str, Callable[[Tensor], Tensor]] = {
    "mean": lambda x: F.cross_entropy(x.flatten(0, 1), LABELS.flatten()),
    "classes second": lambda x: F.cross_entropy(x.transpose(1, 2), LABELS),
    "weighted": lambda x: F.cross_entropy(x.flatten(0, 1), LABELS.flatten(), weight=WEIGHT),
    "weighted and smoothed": lambda x: F.cross_entropy(x.transpose(1, 2), LABELS, WEIGHT, label_smoothing=0.2),
    "smoothed": lambda x: F.cross_entropy(x.flatten(0, 1), LABELS.flatten(), label_smoothing=0.2),
    "another label ignored": lambda x: F.cross_entropy(x.flatten(0, 1), LABELS.flatten() % 5, ignore_index=3),
    "summed": lambda x: F.cross_entropy(x.flatten(0, 1), LABELS.flatten(), reduction="sum"),
    "each": lambda x: F.cross_entropy(x.transpose(1, 2), LABELS, reduction="none").mean(),
    "of probabilities": lambda x: F.cross_entropy(x.flatten(0, 1), NUMBERS.flatten(0, 1), WEIGHT),
    "of logarithms": lambda x: F.nll_loss(x.log_softmax(-1).flatten(0, 1), LABELS.flatten(), WEIGHT),
    "squares": lambda x: F.mse_loss(x, NUMBERS),
    "weighted squares": lambda x: F.mse_loss(x, 2 * NUMBERS, weight=NUMBERS),
    "distances": lambda x: F.l1_loss(x, 2 * NUMBERS),
    "bent distances": lambda x: F.huber_loss(x, NUMBERS, delta=0.3, weight=NUMBERS) + F.smooth_l1_loss(x, NUMBERS),
    "binary": lambda x: F.binary_cross_entropy_with_logits(x, NUMBERS, pos_weight=WEIGHT),
    "binary with weights": lambda x: F.binary_cross_entropy(x.sigmoid(), NUMBERS, weight=NUMBERS[:1], reduction="sum"),
    "divergence": lambda x: F.kl_div(x.log_softmax(-1), NUMBERS, reduction="batchmean"),
}


@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_is_the_sum_of_own_rows_over_the_count_of_all(name: str) -> None:
    full = torch.randn(2, 4, CLASSES, requires_grad=True)
    expected = LOSSES[name](full)
    expected.backward()
    found, gradients = torch.zeros(()), []
    for rank in range(2):
        local = full.detach().chunk(2, 1)[rank].clone().requires_grad_()
        axis = _Summing(rank)
        x = ShardedTensor(local, axis, Shard(1))
        with Interpreter(axis):
            loss = LOSSES[name](x)
        loss.backward()
        assert {sum.numel() for sum in axis.sums} == {1}, "more than a number is sent"
        found, gradients = found + loss.detach(), [*gradients, local.grad]
    torch.testing.assert_close(found, expected.detach())
    torch.testing.assert_close(torch.cat([gradient for gradient in gradients if gradient is not None], 1), full.grad)


@pytest.mark.parametrize("changes", [False, True])
def test_one_of_two_operands_is_cut_as_the_other(changes: bool) -> None:
    axis = PlannedAxis(2)
    x = ShardedTensor(torch.randn(2, 3, 8), axis, Shard(1))
    y = ShardedTensor(torch.randn(2, 6, 4), axis, Shard(2))
    with Interpreter(axis):
        made = y.add_(x) if changes else x + y
    assert isinstance(made, ShardedTensor)
    assert made.placement == Shard(2 if changes else 1)
    assert [(sent.collective.kind, sent.collective.num_bytes) for sent in axis.forward] == [("all-to-all", 96)]


class _Watched(PlannedAxis):
    """Knows what it gathered, as long as somebody keeps that."""

    def __init__(self) -> None:
        super().__init__(2)
        self.gathered: list[weakref.ref[Tensor]] = []

    def all_gather(self, local: Tensor, at: Shard) -> Tensor:
        every = super().all_gather(local, at)
        self.gathered.append(weakref.ref(every))
        return every


def test_no_backward_keeps_what_it_gathers_again() -> None:
    local, weight = torch.randn(2, 4, 8, requires_grad=True), torch.randn(3, 8, requires_grad=True)
    axis = _Watched()
    gathered = GatheredSequence(local, axis, Shard(1))
    with gathered.not_saved():
        output = F.linear(gathered.whole, weight)
    del gathered
    for _ in range(3):
        output.sum().backward(retain_graph=True)
    gc.collect()
    assert len(axis.gathered) == 4, "the forward, and each backward once"
    assert [tensor for tensor in axis.gathered if tensor() is not None] == []
