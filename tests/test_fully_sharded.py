"""Stage 3: code that reads parameters where their unit is not gathered trains as in one process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.hugging_face import MLM, hf_job, text_settings
from tests.models import ADAM_EPS, TinyGPT, tokens
from tests.parity import Job, Layout, assert_parity, run_layout, run_reference
from tests.tables import on_four_ranks, some_in_matrix
from tests.workers import WorkerError, WorkerPools


class Model(TinyGPT):
    """A small GPT; each class below makes some use of its parts beside calling blocks."""

    def __init__(self) -> None:
        super().__init__(num_layers=2, width=16, tied=False)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2, eps=ADAM_EPS)


class GlueReadsWeight(Model):
    """Ties embedding and head by a functional call; `head` is used by nothing."""

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens)
        for block in self.blocks:
            x = block(x)
        return F.linear(self.norm(x), self.tokens.weight)


class BlockGetsWeight(Model):
    """Hands a block's weight to another block."""

    class _Mixed(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(width))

        def forward(self, x: Tensor, table: Tensor) -> Tensor:
            return x * self.scale + torch.softmax(x @ table.T, -1) @ table

    def __init__(self) -> None:
        super().__init__()
        self.mixed = self._Mixed(16)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.mixed(self.norm(x), self.positions.weight))
        return logits


class CallsChildren(Model):
    """Calls a block, and then its children one by one, again and again, under a checkpoint."""

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens)
        for block in self.blocks:
            x = block(x)
        for _ in range(2):
            for layer in self.blocks[1].mlp:  # type: ignore[union-attr]
                x = layer(x)
        x = checkpoint(self.blocks[0].mlp, x, use_reentrant=False)  # type: ignore[arg-type]
        logits: Tensor = self.head(self.norm(x))
        return logits


class CallsOtherMethod(Model):
    """Calls another method of a block than its forward."""

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens)
        for block in self.blocks:
            x = block(x) + block.attention(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


class ValidatesOtherwise(Model):
    """Reads in validation what training does not."""

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens)
        for block in self.blocks:
            x = block(x)
        if not self.training:
            x = self.blocks[0].mlp(x) + x @ self.blocks[0].mlp[0].weight.T.mean(1, keepdim=True)  # type: ignore[index,operator,union-attr]
        logits: Tensor = self.head(self.norm(x))
        return logits


class CallsChildrenAlone(Model):
    """Never calls a block itself."""

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens)
        for block in self.blocks:
            x = x + block.attention(block.norm1(x))  # type: ignore[operator]
            x = x + block.mlp(block.norm2(x))  # type: ignore[operator]
        logits: Tensor = self.head(self.norm(x))
        return logits


class Penalised(Model):
    """Adds a penalty over all parameters."""

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        return loss + 1e-2 * sum(parameter.square().sum() for parameter in self.parameters())


class ChangesInPlace(Model):
    """Keeps an average of a weight, and clamps another, in its step."""

    def __init__(self) -> None:
        super().__init__()
        self.average = nn.Linear(16, 64, bias=False).requires_grad_(False)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        with torch.no_grad():
            self.average.weight.lerp_(self.head.weight, 0.5)
            self.average.weight.data.mul_(0.9).add_(torch.ones(64, 16), alpha=1e-2)
            self.head.weight.clamp_(-0.1, 0.1)
        loss = super().training_step(batch, batch_idx)
        return loss + F.mse_loss(self.average.weight, self.head.weight)


HABITS: list[tuple[Callable[[], L.LightningModule], bool]] = [
    (GlueReadsWeight, True),
    (BlockGetsWeight, True),
    (CallsChildren, True),
    (CallsOtherMethod, True),
    (ValidatesOtherwise, False),
    (CallsChildrenAlone, False),
    (Penalised, True),
    (ChangesInPlace, False),
]
"""Model, and whether a pipeline takes it."""


def _job(model: Callable[[], L.LightningModule]) -> Job:
    return Job(model=model, data=tokens, num_val_batches=1, gradient_clip_val=0.5)


@pytest.mark.parametrize("reshards", [True, False])
@pytest.mark.parametrize("model", [model for model, _ in HABITS])
def test_reads_outside_of_units(workers: WorkerPools, model: Callable[[], L.LightningModule], reshards: bool) -> None:
    layout = Layout(dp=2, zero=3, zero_settings={"reshard_after_forward": reshards})
    assert_parity(run_reference(_job(model)), run_layout(workers, _job(model), layout))


@pytest.mark.parametrize("reshards", [True, False])
@pytest.mark.parametrize(
    "model",
    some_in_matrix(
        [model for model, is_for_pipelines in HABITS if is_for_pipelines], lambda model: model is not GlueReadsWeight
    ),
)
def test_reads_outside_of_units_in_a_pipeline(
    workers: WorkerPools, model: Callable[[], L.LightningModule], reshards: bool
) -> None:
    layout = Layout(pp=2, dp=2, zero=3, num_microbatches=2, zero_settings={"reshard_after_forward": reshards})
    assert_parity(run_reference(_job(model)), run_layout(workers, _job(model), layout))


def test_validation_that_reads_a_block_of_another_stage_is_refused(workers: WorkerPools) -> None:
    message = r"Pipeline stage 1: linear .* reads blocks.0.mlp.0.weight, of a block on another"
    with pytest.raises(WorkerError, match=message):
        run_layout(workers, _job(ValidatesOtherwise), Layout(pp=2))


@pytest.mark.parametrize(
    "layout", some_in_matrix([Layout(dp=2, zero=3), Layout(pp=2, dp=2, zero=3)], on_four_ranks), ids=str
)
def test_deberta(workers: WorkerPools, layout: Layout) -> None:
    settings = text_settings(width=16, num_heads=2, num_layers=2)
    job = hf_job("DebertaV2Config", MLM, relative_attention=True, pos_att_type=["c2p", "p2c"], **settings)
    assert_parity(run_reference(job), run_layout(workers, job, layout))


class OddParameters(Model):
    """Scalars, empty tensors, and several dtypes in one block and outside of blocks."""

    class _Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(16, 16)
            self.gain, self.nothing = nn.Parameter(torch.tensor(0.5)), nn.Parameter(torch.zeros(0, 3))
            self.precise = nn.Parameter(torch.ones(5, dtype=torch.float64))

        def forward(self, x: Tensor) -> Tensor:
            return x + self.gain * self.inner(x) * self.precise.square().sum().float() + self.nothing.sum()

    def __init__(self) -> None:
        super().__init__()
        self.blocks.append(self._Odd())
        self.blocks.insert(0, self._Odd())
        self.scale = nn.Parameter(torch.tensor(1.0))
        self.unused = nn.Parameter(torch.tensor(1.0))
        self.shift = nn.Parameter(torch.zeros(3, dtype=torch.float64))

    def forward(self, tokens: Tensor) -> Tensor:
        return super().forward(tokens) * self.scale + self.shift.exp().mean().float()


@pytest.mark.parametrize(
    "layout",
    some_in_matrix(
        [
            Layout(dp=2, zero=3),
            Layout(pp=2, dp=2, zero=3),
            Layout(pp=2, dp=2, zero=3, schedule="zbv"),
        ],
        lambda layout: layout.pp > 1 and layout.schedule != "zbv",
    ),
    ids=str,
)
def test_parameters_that_fsdp_refuses(workers: WorkerPools, layout: Layout) -> None:
    job = Job(model=OddParameters, data=tokens, num_val_batches=1, gradient_clip_val=0.5, accumulate_grad_batches=2)
    assert_parity(run_reference(job), run_layout(workers, job, layout))
