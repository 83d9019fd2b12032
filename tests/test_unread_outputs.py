"""Outputs of blocks that nothing reads stay on shards; a step that reads them after all sees their values."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.models import Block, TinyGPT
from tests.parity import Job, Layout, assert_parity, run_layout, run_reference
from tests.workers import WorkerPools


class TellingBlock(Block):
    """It also returns its attention weights, (B, H, T, T), as some models of transformers do."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        batch, length, width = x.shape
        attention, normed = self.attention, self.norm1(x)
        split = (batch, length, attention.num_heads, width // attention.num_heads)
        q, k, v = (p(normed).view(split).transpose(1, 2) for p in (attention.q, attention.k, attention.v))
        scores = q @ k.transpose(-2, -1) / split[-1] ** 0.5
        mask = torch.ones(length, length, dtype=torch.bool, device=x.device).tril()
        weights = scores.masked_fill(~mask, float("-inf")).softmax(-1)
        x = x + attention.out((weights @ v).transpose(1, 2).reshape(batch, length, width))
        return x + self.mlp(self.norm2(x)), weights


class Telling(TinyGPT):
    """It never reads them."""

    def __init__(self) -> None:
        super().__init__(num_layers=2)
        self.blocks = nn.ModuleList(TellingBlock(32, 4) for _ in range(2))

    def outputs(self, tokens: Tensor) -> tuple[Tensor, list[Tensor]]:
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        every = []
        for block in self.blocks:
            x, weights = block(x)
            every.append(weights)
        return self.head(self.norm(x)), every

    def forward(self, tokens: Tensor) -> Tensor:
        return self.outputs(tokens)[0]


class Curious(Telling):
    """From the second step on its loss has a term of them."""

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        inputs, targets = batch
        logits, every = self.outputs(inputs)
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
        if batch_idx > 0:
            loss = loss + sum(weights.square().mean() for weights in every)
        self.log("loss", loss, on_step=True, on_epoch=True, prog_bar=True, sync_dist=True)
        return loss


class Attentive(Telling):
    """Its loss has a term of them on every step."""

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Any:
        return Curious.training_step(self, batch, 1)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("model", "layout"),
    [
        (Telling, Layout(tp=2)),
        (Telling, Layout(tp=2, sequence_parallel=True)),
        pytest.param(Telling, Layout(pp=2, tp=2, num_microbatches=2), marks=pytest.mark.matrix),
        pytest.param(Telling, Layout(dp=2, tp=2, zero=3), marks=pytest.mark.matrix),
        (Curious, Layout(tp=2)),
        (Curious, Layout(dp=2, tp=2, zero=3)),
    ],
    ids=str,
)
def test_what_nothing_reads_is_not_gathered(workers: WorkerPools, model: type[Telling], layout: Layout) -> None:
    job = Job(model=model)
    result = run_layout(workers, job, layout)
    assert_parity(run_reference(job), result, tolerance=1e-5)
    for plan in (block.tensor for block in result.plan.blocks if block.kind == TellingBlock.__name__):
        assert plan is not None
        assert plan.unread == {1}
        num_reduces = plan.num_all_reduces_forward + plan.num_all_reduces_backward
        assert plan.is_sequence_parallel or num_reduces == 4
        assert plan.num_other_collectives_forward == (5 if plan.is_sequence_parallel else 0)


def test_what_a_step_reads_is_gathered(workers: WorkerPools) -> None:
    job = Job(model=Attentive)
    result = run_layout(workers, job, Layout(tp=2))
    assert_parity(run_reference(job), result, tolerance=1e-5)
    assert all(block.tensor is None or not block.tensor.unread for block in result.plan.blocks)


class KeepingBlock(Block):
    """It keeps the activations of its MLP."""

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        self.hidden = self.mlp[1](self.mlp[0](self.norm2(x)))
        output: Tensor = x + self.mlp[2](self.hidden)
        return output


class Sparse(TinyGPT):
    """Its loss has a term of what blocks keep."""

    def __init__(self) -> None:
        super().__init__(num_layers=2)
        self.blocks = nn.ModuleList(KeepingBlock(32, 4) for _ in range(2))

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        inputs, targets = batch
        loss = F.cross_entropy(self(inputs).flatten(0, 1), targets.flatten())
        loss = loss + sum(block.hidden.abs().mean() for block in self.blocks)
        self.log("loss", loss, on_step=True, on_epoch=True, prog_bar=True, sync_dist=True)
        return loss


@pytest.mark.parametrize("layout", [Layout(tp=2), Layout(pp=2, tp=2, num_microbatches=2)], ids=str)
def test_what_a_block_keeps_is_whole_to_its_readers(workers: WorkerPools, layout: Layout) -> None:
    job = Job(model=Sparse)
    result = run_layout(workers, job, layout)
    assert_parity(run_reference(job), result, tolerance=1e-5)
    plans = [block.tensor for block in result.plan.blocks if block.kind == KeepingBlock.__name__]
    assert [plan is not None and plan.is_sharded for plan in plans] == [True, True]
