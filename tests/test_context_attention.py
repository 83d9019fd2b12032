"""Attention on slices of a sequence, by each way of `context.attention`: numbers, bytes, and what a way can't serve."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.attention import SDPBackend, sdpa_kernel

from lightning_3d import ThreeDStrategy
from lightning_3d.config.context import AttentionWay
from lightning_3d.context.axis import ContextAxis
from lightning_3d.context.choice import Sequences
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


def _found(way: AttentionWay, attention: Attention) -> Found:
    axis = ContextAxis(init_device_mesh("cpu", (torch.distributed.get_world_size(),)))
    interpreter = ContextInterpreter(axis, way)
    sent, shapes = [0], list[tuple[int, ...]]()
    pass_on, all_gather = ContextAxis.pass_on, ContextAxis.all_gather

    def counted(self: ContextAxis, tensor: Tensor, coming: Tensor) -> Any:
        sent[0] += tensor.nbytes
        return pass_on(self, tensor, coming)

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


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("way", ["ring", "gather"])
@pytest.mark.parametrize("name", ATTENTIONS)
def test_attention_is_that_of_one_process(workers: WorkerPools, name: str, way: AttentionWay, size: int) -> None:
    attention = ATTENTIONS[name]
    tolerance = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 5e-2}[attention.dtype]
    for found in workers(size).run(_found, way, attention):
        assert found.difference < tolerance
        assert bool(found.sent[0]) == (way == "ring")


@pytest.mark.parametrize("size", [2, 4])
def test_heads_alone_are_that_of_one_process(workers: WorkerPools, size: int) -> None:
    for found in workers(size).run(_found, "ulysses", Attention(length=15)):
        assert found.difference < 1e-5
        assert found.sent == (0, 0)
        assert found.shape == ()


@pytest.mark.parametrize("size", [2, 4])
def test_a_ring_sends_each_slice_to_all_but_its_rank_and_gradients_as_far(workers: WorkerPools, size: int) -> None:
    """Of slices of keys and values: one each to every other rank, and backward these and their gradients."""
    attention = Attention(kv_heads=2)
    slices = sum(tensor.nbytes for tensor in attention.operands()[1:]) // size
    for found in workers(size).run(_found, "ring", attention):
        assert found.sent == ((size - 1) * slices, 2 * (size - 1) * slices)
        assert found.shape == ()


def test_the_cheapest_way_is_a_ring_where_heads_do_not_divide_and_it_serves(workers: WorkerPools) -> None:
    def ways(attention: Attention) -> list[tuple[bool, bool]]:
        return [(found.sent[0] > 0, found.shape != ()) for found in workers(2).run(_found, "auto", attention)]

    assert ways(Attention()) == [(False, False)] * 2  # by heads
    assert ways(Attention(kv_heads=1)) == [(True, False)] * 2
    assert ways(Attention(kv_heads=1, is_math=True)) == [(False, True)] * 2  # as of a second derivative


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


def _trained(layout: Layout | None) -> tuple[int, dict[str, Tensor]]:
    calls, pass_on = [0], ContextAxis.pass_on

    def counted(self: ContextAxis, tensor: Tensor, coming: Tensor) -> Any:
        calls[0] += 1
        return pass_on(self, tensor, coming)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ContextAxis, "pass_on", counted)
        trainer, _ = fitted(layout, _Grouped, batches=2, epochs=1, limit_val_batches=0)
    return calls[0], whole_state(trainer)


def _moves() -> tuple[str, ...]:
    trainer, _ = fitted(Layout(cp=2), _Grouped, batches=1, epochs=1, limit_val_batches=0)
    assert isinstance(trainer.strategy, ThreeDStrategy)
    return trainer.strategy.plan.findings.slices


def test_the_plan_tells_of_a_ring(workers: WorkerPools) -> None:
    """Of keys and values of (8, 1, 15, 8) numbers each rank sends a half, as if there were 16."""
    for lines in workers(2).run(_moves):
        place = "first in blocks.0, on slices: operands pass round the ranks"
        assert f"scaled_dot_product_attention, {place}; 4.0 KiB" in lines


@pytest.mark.parametrize(
    ("settings", "times"),
    [
        ({}, 1),
        ({"context": {"attention": "gather"}}, 0),
        ({"activations": {"recompute": "full"}}, 4 / 3),
        ({"activations": {"recompute": "selective"}}, 1),  # the output is kept, and nothing is passed again for it
    ],
)
def test_a_model_trains_in_a_ring(workers: WorkerPools, settings: dict[str, Any], times: float) -> None:
    _, state = _trained(None)
    ranks = workers(4).run(_trained, Layout(cp=4, **settings))
    assert_same_state([weights for _, weights in ranks], state)
    blocks, batches, turns = 4, 2, 3 * 3  # of keys and values forward and backward, and of their gradients
    assert [calls for calls, _ in ranks] == [blocks * batches * turns * times] * 4
