"""Context parallel with fused losses: a head makes a few rows of a rank's own logits at a time."""

from __future__ import annotations

from functools import partial
from typing import Any
from unittest.mock import patch

import lightning as L
import pytest
import torch.nn.functional as F
from torch import Tensor

from benchmarks.measured_memory import AllocatedPeak
from lightning_3d import ThreeDStrategy
from lightning_3d.tensor.vocabulary import chunked_loss
from tests.models import TinyGPT
from tests.parity import Layout, assert_same_state, fitted, whole_state
from tests.workers import WorkerPools

_CLASSES = 2**16
_LOGITS = 8 * 16 * _CLASSES * 4  # bytes, of 8 samples of 16 tokens


class _Peak(L.Callback):
    """Of the second step, in bytes."""

    def on_train_batch_start(self, trainer: L.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 1:
            self.allocated = AllocatedPeak()
            self.allocated.start()
            self.allocated.mark()

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 1:
            self.num_bytes = self.allocated.stop()


_Large = partial(TinyGPT, vocabulary=_CLASSES, width=8, num_heads=2, num_layers=2)


def _peak(layout: Layout) -> tuple[int, tuple[str, ...]]:
    peak = _Peak()
    with patch.object(chunked_loss, "LEAST_LOGITS", 2**18):
        trainer, _ = fitted(layout, _Large, callbacks=[peak], batches=2, epochs=1, limit_val_batches=0)
    assert isinstance(trainer.strategy, ThreeDStrategy)
    return peak.num_bytes, trainer.strategy.plan.findings.heads


@pytest.mark.parametrize(
    "layout", [Layout(cp=2), Layout(cp=2, zero=3), Layout(pp=2, cp=2, num_microbatches=2)], ids=str
)
def test_no_logits_are_made(workers: WorkerPools, layout: Layout) -> None:
    """Neither all of them nor those of own rows; the weight and its gradients are 1 / 16 of all logits each."""
    for num_bytes, _ in workers(layout.world_size).run(_peak, layout):
        assert num_bytes < _LOGITS / layout.cp * 3 / 4


class _Shifts(TinyGPT):
    """Predicts tokens from those before by shifted logits, some of which are ignored, and reads others; uneven."""

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        inputs = batch[0][:, : 9 if batch_idx == 1 else 3]
        logits = self(inputs).float() / 0.7
        labels = inputs.masked_fill(inputs < 8, -100)
        shifted = F.cross_entropy(logits[:, :-1].transpose(1, 2), labels[:, 1:])
        first = F.nll_loss(logits[:, 2:].log_softmax(-1).flatten(0, 1), inputs[:, 2:].flatten())
        loss = shifted + 0.5 * first
        self.log("loss", loss, on_step=True, on_epoch=True, sync_dist=True)
        return loss


def _trained(layout: Layout | None) -> dict[str, Tensor]:
    return whole_state(fitted(layout, _Shifts, batches=3, epochs=1)[0])


@pytest.mark.parametrize("layout", [Layout(cp=2), Layout(cp=2, zero=3)], ids=str)
def test_shifted_losses_of_slices_are_those_of_one_process(workers: WorkerPools, layout: Layout) -> None:
    assert_same_state(workers(2).run(_trained, layout), _trained(None))
