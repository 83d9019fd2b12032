"""What rank 0 tells of the layout when a fit begins, and what the plan says of losses once steps have shown it."""

from __future__ import annotations

import logging

import lightning as L
import torch
import torch.nn.functional as F
from lightning_utilities.core import rank_zero
from torch import Tensor, nn

from lightning_3d import ThreeDStrategy
from tests.models import loader, tokens
from tests.parity import QUIET, Layout
from tests.workers import WorkerPools


class Normalised(L.LightningModule):
    """Several blocks, BatchNorm among them, and a cross entropy."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(64, 32)
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(32, 32), nn.BatchNorm1d(32)) for _ in range(8)))
        self.head = nn.Linear(32, 64)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        inputs, targets = batch
        return F.cross_entropy(self.head(self.layers(self.embed(inputs[:, 0]))), targets[:, 0])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters())


class Shown(Normalised):
    """Shows the sizes of what its modules give, by a forward of them alone."""

    def __init__(self) -> None:
        super().__init__()
        self.example_input_array = torch.zeros(2, dtype=torch.long)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layers(self.embed(x)))  # type: ignore[no-any-return]


class _Messages(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


def _told(layout: Layout, shows: bool = True) -> tuple[list[str], tuple[str, ...]]:
    """What is told in two fits with one Trainer, and the lines on losses in its plan."""
    messages, strategy = _Messages(), layout.strategy()
    rank_zero.log.addHandler(messages)
    settings = {**QUIET, "enable_model_summary": shows, "max_epochs": 1, "limit_val_batches": 0}
    trainer = L.Trainer(strategy=strategy, devices=layout.world_size, enable_checkpointing=False, **settings)
    model = Normalised()
    for num_epochs in (1, 2):
        trainer.fit_loop.max_epochs = num_epochs
        trainer.fit(model, loader(tokens(16), global_batch_size=8, data_parallel_size=layout.dp))
    rank_zero.log.removeHandler(messages)
    assert isinstance(strategy, ThreeDStrategy)
    return [text for text in messages.texts if text.startswith(("Layout", "BatchNorm"))], strategy.plan.findings.losses


def _steps(layout: Layout) -> int:
    settings = {**QUIET, "enable_model_summary": True, "max_epochs": 1, "limit_val_batches": 0}
    trainer = L.Trainer(
        strategy=layout.strategy(), devices=layout.world_size, enable_checkpointing=False, max_steps=2, **settings
    )
    trainer.fit(Shown(), loader(tokens(16), global_batch_size=8, data_parallel_size=layout.dp))
    return trainer.global_step


def test_a_summary_may_run_submodules_at_stage_3(workers: WorkerPools) -> None:
    assert workers(2).run(_steps, Layout(dp=2, zero=3)) == [2, 2]


def test_rank_zero_tells_once_what_layout_is_running(workers: WorkerPools) -> None:
    (first, losses), (second, _) = workers(2).run(_told, Layout(pp=2))
    assert second == []
    (text,) = first
    lines = text.splitlines()
    assert lines[0] == "Layout: 2 ranks = pipeline 2 x data 1 x tensor 1"
    assert [line.partition(":")[0].strip() for line in lines[1:3]] == ["stage 0 on rank 0", "stage 1 on rank 1"]
    assert "(4 x Sequential)" in lines[1]
    for told in (
        "1f1b, with 2 microbatches",
        "loss: that of the whole batch, as on one device",
        "BatchNorm (8 modules) normalises each microbatch by itself",
    ):
        assert told in text
    assert lines[-1].startswith("  each rank holds at most")
    (loss,) = losses
    assert loss.startswith("training_step: the loss is a mean of those of the microbatches with weights")


def test_data_parallel_is_told_in_few_lines_unless_no_summary_is_wanted(workers: WorkerPools) -> None:
    (first, losses), _ = workers(2).run(_told, Layout(dp=2, zero=3))
    (text,) = first
    assert "ZeRO stage 3: optimizer states, gradients and parameters are sharded over 2 ranks" in text
    assert "BatchNorm (8 modules) normalises each data-parallel rank's batch by itself, as under DDP" in text
    assert (len(text.splitlines()), losses) == (4, ())
    assert [told for told, _ in workers(2).run(_told, Layout(dp=2), False)] == [[], []]


def test_norms_of_microbatches_are_told_where_no_summary_is_wanted(workers: WorkerPools) -> None:
    (first, _), (second, _) = workers(2).run(_told, Layout(pp=2), False)
    (text,) = first
    assert text.startswith("BatchNorm (8 modules) normalises each microbatch by itself")
    assert text.endswith("pipeline.mode=inline normalises the batch, as one process does")
    assert second == []
