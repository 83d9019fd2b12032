"""Attention on slices of a sequence, by each way of `context.attention`: numbers, bytes, and what a way can't serve."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.attention import SDPBackend, sdpa_kernel

from lightning_3d import ThreeDStrategy
from lightning_3d.config.context import AttentionWay, ContextConfig, RowOrder
from lightning_3d.context import ring
from lightning_3d.context.axis import ContextAxis
from lightning_3d.context.choice import Sequences
from lightning_3d.context.head_tail import head_tail
from lightning_3d.context.interpreter import ContextInterpreter
from lightning_3d.sharding.collectives import redistribute
from lightning_3d.sharding.placement import chunked
from lightning_3d.sharding.sharded_tensor import ShardedTensor
from tests.models import TinyGPT
from tests.parity import Layout, assert_same_state, fitted, whole_state
from tests.workers import WorkerError, WorkerPools


@dataclass(frozen=True, kw_only=True)
class Attention:
    """A call, of `(2, heads, length, 8)`."""

    heads: int = 4
    kv_heads: int = 4
    length: int = 16
    keys: int | None = None
    """Where there are not as many as queries."""
    options: Mapping[str, Any] = field(default_factory=dict)
    dtype: torch.dtype = torch.float32
    num_dims: int = 4
    is_math: bool = False
    """Whether torch may use no fused kernel."""

    def operands(self) -> list[Tensor]:
        torch.manual_seed(0)
        keys = self.length if self.keys is None else self.keys
        shapes = (self.heads, self.length), *((self.kv_heads, keys),) * 2
        found = [torch.randn(2, rows, heads, 8, dtype=self.dtype).transpose(1, 2) for heads, rows in shapes]
        return [tensor[0] for tensor in found] if self.num_dims == 3 else found

    def made(self, *operands: Tensor) -> Tensor:
        with sdpa_kernel(SDPBackend.MATH if self.is_math else [SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]):
            return F.scaled_dot_product_attention(
                *operands, enable_gqa=self.heads != self.kv_heads, **{"is_causal": True, **self.options}
            )


@dataclass(frozen=True, kw_only=True)
class Found:
    """What a rank found."""

    difference: float
    """The greatest of output and gradients from those of one process."""
    sent: tuple[int, int]
    """Bytes passed on in the forward, and in the backward."""
    shape: tuple[int, ...]
    """Of all keys that are held, per dim the most: of gathered ones in full."""


def _found(way: AttentionWay, attention: Attention, order: RowOrder = "in_order") -> Found:
    axis = ContextAxis(init_device_mesh("cpu", (torch.distributed.get_world_size(),)))
    interpreter = ContextInterpreter(axis, ContextConfig(attention=way, order=order))
    sent, shapes = [0], list[tuple[int, ...]]()
    pass_on, all_gather, exchange = ContextAxis.pass_on, ContextAxis.all_gather, ContextAxis.exchange

    def counted(self: ContextAxis, tensor: Tensor, coming: Tensor) -> Any:
        sent[0] += tensor.nbytes
        return pass_on(self, tensor, coming)

    def to_others(self: ContextAxis, rows: Tensor, going: list[int], coming: list[int]) -> Tensor:
        sent[0] += (rows.numel() - going[self.rank]) * rows.element_size()
        return exchange(self, rows, going, coming)

    def seen(self: ContextAxis, tensor: Tensor, at: Any) -> Tensor:
        gathered = all_gather(self, tensor, at)
        shapes.append(tuple(gathered.shape))
        return gathered

    whole = [tensor.double().requires_grad_() for tensor in attention.operands()]
    expected = attention.made(*whole)
    gradient = torch.randn_like(expected)
    wanted = [expected, *torch.autograd.grad(expected, whole, gradient)]
    dim = -2 % expected.dim()
    places = [chunked(dim, tensor.shape[dim], axis.size) for tensor in whole]
    leaves = [
        at.own(tensor, axis.size, axis.rank).requires_grad_()
        for tensor, at in zip(attention.operands(), places, strict=True)
    ]
    lengths = frozenset({attention.length, whole[1].shape[dim]})
    interpreter.sequences = Sequences(lengths=lengths, batch=2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ContextAxis, "pass_on", counted)
        patch.setattr(ContextAxis, "all_gather", seen)
        patch.setattr(ContextAxis, "exchange", to_others)
        cut = [ShardedTensor(leaf * 1.0, axis, at) for leaf, at in zip(leaves, places, strict=True)]
        with interpreter.statistics, interpreter:
            if attention.is_math:  # what is found for a call holds while torch may use the same kernels
                replace(attention, is_math=False).made(*cut)
                sent[0] = 0
            output = attention.made(*cut)
        assert isinstance(output, ShardedTensor)
        local = redistribute(output.own(), axis, output.placement, places[0])
        forward, sent[0] = sent[0], 0
        own = places[0].own(gradient, axis.size, axis.rank).to(local.dtype)
        found = [local, *torch.autograd.grad(local, leaves, own)]
    differences = [
        (part.double() - at.own(full, axis.size, axis.rank)).abs().max().item() if part.numel() else 0.0
        for part, full, at in zip(found, wanted, [places[0], *places], strict=True)
    ]
    largest = tuple(max(lengths) for lengths in zip(*shapes, strict=True))
    return Found(difference=max(differences), sent=(forward, sent[0]), shape=largest)


ATTENTIONS = {
    "causal": Attention(),
    "unmasked": Attention(options={"is_causal": False, "scale": 0.5}),
    "grouped": Attention(kv_heads=2),
    "of one head": Attention(kv_heads=1),
    "uneven": Attention(length=13, kv_heads=2),
    "shorter than ranks twice": Attention(length=5),
    "of two lengths": Attention(length=8, keys=5, options={"is_causal": False}),
    "of three dims": Attention(num_dims=3),
    "half": Attention(kv_heads=2, dtype=torch.bfloat16, length=15),
    "double": Attention(dtype=torch.float64),
}


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize(("way", "order"), [("ring", "in_order"), ("ring", "head_tail"), ("gather", "in_order")])
@pytest.mark.parametrize("name", ATTENTIONS)
def test_attention_is_that_of_one_process(
    workers: WorkerPools, name: str, way: AttentionWay, order: RowOrder, size: int
) -> None:
    attention = ATTENTIONS[name]
    tolerance = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 5e-2}[attention.dtype]
    for found in workers(size).run(_found, way, attention, order):
        assert found.difference < tolerance
        assert bool(found.sent[0]) == (way == "ring")


@pytest.mark.parametrize("size", [2, 4])
def test_heads_alone_are_that_of_one_process(workers: WorkerPools, size: int) -> None:
    for found in workers(size).run(_found, "ulysses", Attention(length=15)):
        assert found.difference < 1e-5
        assert found.sent == (0, 0)
        assert found.shape == ()


MOVED: Mapping[tuple[RowOrder, int], list[float]] = {
    ("in_order", 2): [0, 0],
    ("in_order", 4): [0, 0, 0, 0],
    ("head_tail", 2): [0.5, 0.5],
    ("head_tail", 3): [0.5, 1, 1],
    ("head_tail", 4): [0.5, 1, 0.5, 1],
}
"""By order and rank which part of its slice a rank sends away before the ring, and gets back behind it."""


@pytest.mark.parametrize(("order", "size"), MOVED)
def test_a_ring_sends_each_slice_to_all_but_its_rank_and_gradients_as_far(
    workers: WorkerPools, order: RowOrder, size: int
) -> None:
    """Of slices of keys and values: one each to every other rank, and backward these and their gradients.

    Head-tail also what moves of queries, keys, values and the output, and as much backward.
    """
    attention = Attention(kv_heads=2, length=8 * size)
    query, key, value = (tensor.nbytes // size for tensor in attention.operands())
    ring = (size - 1) * (key + value)
    for found, moved in zip(workers(size).run(_found, "ring", attention, order), MOVED[order, size], strict=True):
        exchange = moved * (query + key + value + query)
        assert found.sent == (ring + exchange, 2 * ring + exchange)
        assert found.shape == ()


def _attended(order: RowOrder) -> list[int]:
    """Keys that this rank's queries attend to, in the forward and in the backward."""
    counts = [0, 0]

    def counting(index: int, function: Callable[..., Any], first: int) -> Callable[..., Any]:
        def counted(*operands: Tensor, is_causal: bool, **options: Any) -> Any:
            queries, keys = (tensor.shape[2] for tensor in operands[first : first + 2])
            counts[index] += queries * (queries + 1) // 2 if is_causal else queries * keys
            return function(*operands, is_causal=is_causal, **options)

        return counted

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ring, "attend", counting(0, ring.attend, 0))
        patch.setattr(ring, "attend_backward", counting(1, ring.attend_backward, 1))
        found = _found("ring", Attention(heads=1, kv_heads=1, length=4096), order)
    assert found.difference < 1e-4
    return counts


@pytest.mark.parametrize("order", ["in_order", "head_tail"])
def test_of_heads_and_tails_all_ranks_compute_as_much(workers: WorkerPools, order: RowOrder) -> None:
    ranks = workers(4).run(_attended, order)
    for by_rank in zip(*ranks, strict=True):
        assert sum(by_rank) == 4096 * 4097 // 2
        assert (max(by_rank) < 1.05 * min(by_rank)) == (order == "head_tail")


@pytest.mark.parametrize(("size", "kv_heads", "least"), [(2, 8, 2048), (4, 8, 1366), (4, 1, 768)])
def test_rows_are_exchanged_where_the_last_rank_is_spared_more(size: int, kv_heads: int, least: int) -> None:
    """From `least` rows a rank on; each number sent is worth 1024 multiplications."""

    def taken(order: RowOrder, rows: int) -> bool:
        query, key = (torch.empty(2, heads, rows * size, 64, device="meta") for heads in (8, kv_heads))
        return head_tail(order, query, key, (rows,) * size) is not None

    assert [taken("auto", rows) for rows in (least - 2, least)] == [False, True]
    assert [taken("head_tail", 2), taken("in_order", 10_000)] == [True, False]


def test_the_cheapest_way_is_a_ring_where_heads_do_not_divide_and_it_serves(workers: WorkerPools) -> None:
    def ways(attention: Attention) -> list[tuple[bool, bool]]:
        return [(found.sent[0] > 0, found.shape != ()) for found in workers(2).run(_found, "auto", attention)]

    assert ways(Attention()) == [(False, False)] * 2  # by heads
    assert ways(Attention(kv_heads=1)) == [(True, False)] * 2
    assert ways(Attention(kv_heads=1, is_math=True)) == [(False, True)] * 2  # as of a second derivative
    few_heads = Attention(heads=8, kv_heads=2)
    assert ways(few_heads) == [(True, False)] * 2
    assert ways(replace(few_heads, length=1024)) == [(False, False)] * 2  # the second rank would compute for longer


REFUSED = {
    "ring with a mask": ("ring", Attention(options={"is_causal": False, "attn_mask": torch.ones(16, 16).bool()})),
    "ring with dropout": ("ring", Attention(options={"dropout_p": 0.1})),
    "ring of two lengths": ("ring", Attention(keys=8)),
    "ring without its kernel": ("ring", Attention(is_math=True)),
    "gather with dropout": ("gather", Attention(options={"dropout_p": 0.1})),
    "ulysses of one head": ("ulysses", Attention(kv_heads=1)),
}
SAID = {
    "ring with a mask": "it passes no mask round but a causal one, and there is an attn_mask",
    "ring with dropout": "it drops nothing, and there is dropout_p=0.1",
    "ring of two lengths": "with is_causal it takes as many keys as queries",
    "ring without its kernel": "torch has no kernel for it, or is told to use none, on cpu for torch.float32",
    "gather with dropout": "it drops nothing, and there is dropout_p=0.1",
    "ulysses of one head": "it cuts heads, and 2 ranks do not divide those of all three",
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_a_way_can_not_serve_is_refused_alike(workers: WorkerPools, name: str) -> None:
    way, attention = REFUSED[name]
    with pytest.raises(WorkerError) as error:
        workers(2).run(_found, way, attention)
    for rank in range(2):
        said = error.value.failures[rank]
        assert f"context.attention='{way}' can't serve scaled_dot_product_attention of queries (2, 4, 16, 8)" in said
        assert f"{SAID[name]}. Use context.attention='auto'." in said


class _Grouped(TinyGPT):
    """Has one head of keys and values, which ranks can't share out, and sequences that they can't share out evenly."""

    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            block.attention = _OneHead()

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        return super().training_step((batch[0][:, :15], batch[1][:, :15]), batch_idx)


class _OneHead(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.kv, self.out = nn.Linear(32, 32), nn.Linear(32, 16), nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        q = self.q(x).unflatten(-1, (4, 8)).transpose(1, 2)
        k, v = self.kv(x).unflatten(-1, (2, 1, 8)).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        output: Tensor = self.out(y.transpose(1, 2).flatten(2))
        return output


def _trained(layout: Layout | None) -> tuple[int, int, dict[str, Tensor]]:
    """How often a rank passes tensors on, how often it exchanges rows, and the weights."""
    passed, exchanged, pass_on, exchange = [0], [0], ContextAxis.pass_on, ContextAxis.exchange

    def counted(self: ContextAxis, tensor: Tensor, coming: Tensor) -> Any:
        passed[0] += 1
        return pass_on(self, tensor, coming)

    def counted_rows(self: ContextAxis, *given: Any) -> Tensor:
        exchanged[0] += 1
        return exchange(self, *given)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ContextAxis, "pass_on", counted)
        patch.setattr(ContextAxis, "exchange", counted_rows)
        trainer, _ = fitted(layout, _Grouped, batches=2, epochs=1, limit_val_batches=0)
    return passed[0], exchanged[0], whole_state(trainer)


def _moves() -> tuple[str, ...]:
    trainer, _ = fitted(Layout(cp=2), _Grouped, batches=1, epochs=1, limit_val_batches=0)
    assert isinstance(trainer.strategy, ThreeDStrategy)
    return trainer.strategy.plan.findings.slices


def test_the_plan_tells_of_a_ring(workers: WorkerPools) -> None:
    """Of keys and values of (8, 1, 15, 8) numbers each rank sends a half, as if there were 16."""
    for lines in workers(2).run(_moves):
        place = "first in blocks.0, on slices: operands pass round the ranks"
        assert f"scaled_dot_product_attention, {place}; 4.0 KiB" in lines


_HEAD_TAIL = {"context": {"attention": "ring", "order": "head_tail"}}


@pytest.mark.parametrize(
    ("settings", "times", "exchanges"),
    [
        ({}, 1, 0),
        ({"context": {"attention": "gather"}}, 0, 0),
        ({"activations": {"recompute": "full"}}, 4 / 3, 0),
        ({"activations": {"recompute": "selective"}}, 1, 0),  # what came is kept, and nothing is passed again for it
        (_HEAD_TAIL, 1, 4),
        ({**_HEAD_TAIL, "activations": {"recompute": "full"}}, 4 / 3, 6),
        ({**_HEAD_TAIL, "activations": {"recompute": "selective"}}, 1, 4),
    ],
)
def test_a_model_trains_in_a_ring(workers: WorkerPools, settings: dict[str, Any], times: float, exchanges: int) -> None:
    *_, state = _trained(None)
    ranks = workers(4).run(_trained, Layout(cp=4, **settings))
    assert_same_state([weights for *_, weights in ranks], state)
    blocks, batches, turns = 4, 2, 3 * 3  # of keys and values forward and backward, and of their gradients
    assert [passed for passed, *_ in ranks] == [blocks * batches * turns * times] * 4
    assert [exchanged for _, exchanged, _ in ranks] == [blocks * batches * exchanges] * 4
